"""The node "sage_aot attention" for ComfyUI. Copy or link this folder into ComfyUI's ``custom_nodes``."""

from sage_aot.integrations.comfyui import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS

__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"]
