//! Owns what whole-cluster tests share: a cluster of real processes, waiting with a deadline, reading `/metrics`.
//! Never holds an assertion about one crate's inside: those tests live beside that crate's code.
//! Read first: `cluster::TestCluster`, then `wait::wait_until`.
//! Tests: `tests/*.rs`, each named by the behaviour it checks; the house rules are `tests/tidy/`.

#![forbid(unsafe_code)]

pub mod chaos_proxy;
pub mod cluster;
pub mod configurations;
pub mod etcd_process;
pub mod event_check;
pub mod false_gpu;
pub mod fault_matrix;
pub mod fault_runs;
pub mod footprint;
pub mod goldens;
pub mod gpu_goldens;
pub mod otlp_collector;
pub mod scrape;
pub mod token_exact;
pub mod wait;
pub mod waterfall;

/// 98 kB of public-domain English prose (`data/golden/README.md`): what prompts are cut from.
pub const PROSE: &str = include_str!("../data/golden/ppl.txt");

/// The name that `baton up` serves the real model under.
pub const MODEL: &str = "smollm2-135m";
