"""The Energy Transformer: a forward pass is a descent on an energy."""

__version__ = "0.2.0"

from .attention import EnergyAttention, RelativePositions
from .block import Block, EnergyTransformer
from .dynamics import Euler, descend
from .energy import Energies, Energy, ExternalField, Scaled
from .equilibria import equilibrium
from .graph.anomaly import AnomalyEnergyTransformer
from .graph.classify import GraphClassifier
from .graph.data import Graph, load_graph
from .graph.detector import AnomalyDetector
from .graph.energy import EdgeIndex, EdgeTransformer
from .memory import HopfieldMemory, SignedMemory
from .norm import EnergyLayerNorm
from .solvers import (
    Anderson,
    Backtracking,
    Flow,
    Growing,
    LearnedEuler,
    Momentum,
    solve,
)
from .testing import assert_descends, assert_gradient
from .vision.model import ImageEnergyTransformer, from_pretrained

__all__ = [
    "AnomalyDetector",
    "AnomalyEnergyTransformer",
    "Anderson",
    "Backtracking",
    "Block",
    "EdgeIndex",
    "EdgeTransformer",
    "Energies",
    "Energy",
    "EnergyAttention",
    "EnergyLayerNorm",
    "EnergyTransformer",
    "Euler",
    "ExternalField",
    "Flow",
    "Graph",
    "GraphClassifier",
    "Growing",
    "HopfieldMemory",
    "ImageEnergyTransformer",
    "LearnedEuler",
    "Momentum",
    "RelativePositions",
    "Scaled",
    "SignedMemory",
    "assert_descends",
    "assert_gradient",
    "descend",
    "equilibrium",
    "from_pretrained",
    "load_graph",
    "solve",
]
