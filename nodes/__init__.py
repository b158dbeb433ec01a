"""ComfyUI nodes: a schema, one call into ``core.comfy_adapter``, the result."""
