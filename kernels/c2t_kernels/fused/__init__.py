"""The operations as Triton kernels, each judged by its twin in c2t_kernels.reference. Importing this needs Triton."""
