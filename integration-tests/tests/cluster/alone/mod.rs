//! Clusters that must run alone: these tests judge times, or load a cluster at a steady rate. The others run two at a time, beside
//! tests of other kinds (`.config/nextest.toml`, `scripts/test`).

mod block_ledger;
mod cancel_storm;
mod fault_matrix;
mod fault_runs;
mod strangers;
mod up_drains;
mod waterfall;
