"""The Energy Transformer: a forward pass is a descent on an energy."""

__version__ = "0.2.0"

from typing import TYPE_CHECKING

from .attention import EnergyAttention, RelativePositions
from .block import Block, EnergyTransformer
from .dynamics import Euler, descend
from .energy import Energy, ExternalField
from .equilibria import equilibrium
from .graph.anomaly import AnomalyEnergyTransformer
from .graph.classify import GraphClassifier
from .graph.data import Graph, load_graph
from .graph.energy import EdgeTransformer
from .memory import HopfieldMemory, SignedMemory
from .norm import EnergyLayerNorm
from .solvers import Anderson, Backtracking, solve
from .testing import assert_descends, assert_gradient
from .vision.model import ImageEnergyTransformer, from_pretrained

if TYPE_CHECKING:
    from .graph.detector import AnomalyDetector

__all__ = [
    "AnomalyDetector",
    "AnomalyEnergyTransformer",
    "Anderson",
    "Backtracking",
    "Block",
    "EdgeTransformer",
    "Energy",
    "EnergyAttention",
    "EnergyLayerNorm",
    "EnergyTransformer",
    "Euler",
    "ExternalField",
    "Graph",
    "GraphClassifier",
    "HopfieldMemory",
    "ImageEnergyTransformer",
    "RelativePositions",
    "SignedMemory",
    "assert_descends",
    "assert_gradient",
    "descend",
    "equilibrium",
    "from_pretrained",
    "load_graph",
    "solve",
]


def __getattr__(name):
    "An estimator of scikit-learn, which is optional: imported when it is asked for."
    if name != "AnomalyDetector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .checks import need

    need("sklearn")
    from .graph.detector import AnomalyDetector

    return AnomalyDetector
