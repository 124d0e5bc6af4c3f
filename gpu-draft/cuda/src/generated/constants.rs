//! Sizes and values of the headers of nvidia-cuda-runtime 13.0.96, nvidia-cublas 13.1.0.3 and nvidia-nccl-cu13 2.28.9. These are
//! the ones that a first check by hand printed on 23 Nov 2026; `scripts/cuda-abi-check --write` adds the rest.

#[rustfmt::skip]
pub(super) const CONSTANTS: &[(&str, u64)] = &[
    ("sizeof(ncclConfig_t)", 80),
    ("offsetof(ncclConfig_t, blocking)", 16),
    ("offsetof(ncclConfig_t, maxCTAs)", 28),
    ("ncclConfig_t.magic", 3405692655),
    ("ncclInProgress", 7),
    ("sizeof(CUipcMemHandle)", 64),
    ("sizeof(CUlaunchAttribute)", 72),
    ("sizeof(cublasLtMatmulAlgo_t)", 64),
    ("sizeof(cublasLtMatmulHeuristicResult_t)", 96),
    ("CUBLASLT_MATMUL_DESC_TRANSA", 3),
];
