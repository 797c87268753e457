"""The name of this package in this process: ``sage_aot``, and in a build for the Hugging Face hub that build's id.

Builds of several versions, and the installed package, may be imported at once. Each registers its operators under its
own name: ``torch.ops.sage_aot``, ``torch.ops._sage_aot_cuda_...``.
"""

PACKAGE = __name__.rpartition(".")[0]
