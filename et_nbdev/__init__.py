"""The Energy Transformer: a forward pass is a descent on an energy."""
__version__ = "0.1.0"
