"""The public call: its signature, the torch operators behind it, and the pipeline that puts a call together."""
