"""ONNX: a graph of a pruned model that onnxruntime runs, its description, and the program that runs it.

`export_graph(checkpoint_or_model, folder, opset=23)` writes the graph (`graph` names its tensors),
`export_onnx` the whole folder.
"""

from leank_convert.onnx.libraries import DEFAULT_OPSET, check_available
from leank_convert.onnx.subject import PrunedModel, load_pruned
from leank_convert.onnx.write import export_graph, export_onnx

__all__ = ["DEFAULT_OPSET", "PrunedModel", "check_available", "export_graph", "export_onnx", "load_pruned"]
