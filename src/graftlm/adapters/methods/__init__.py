"""One file per PEFT method: each maps the method's config and tensors to patches."""
