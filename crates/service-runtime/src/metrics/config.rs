//! The one setting about metrics, shared by all three processes.

use serde::Serialize;

/// To be flattened into a process's config.
#[derive(Clone, Copy, Debug, Default, clap::Args, Serialize)]
pub struct MetricsConfig {
    /// Expose metrics under vLLM's names too, for what reads those (docs/reference/metrics.md lists them)
    #[arg(long)]
    pub vllm_metrics: bool,
}
