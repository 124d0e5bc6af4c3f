//! The fault matrix (rows T2 to T4 of `docs/measurements/reliability.md`): real processes, a faulty link, one fault at one
//! exact point of a request's life, and a judge that compares every token with a fault-free run.
//!
//! `campaign` runs many cells, `cells` reads the matrix from its data file, `rig` is a cluster that can be hurt, made as `options` says of `nodes` on the
//! processors or on the false GPU, `client` is one request as a client sees it, `strike` carries one cell out, `sums` watches the pools meanwhile, `aborts`
//! (T26) how the living end their transfers with a dead node, `readiness` (T14) what the coordinator says of itself, `verdict` says what was wrong with it,
//! `report` adds up.

mod aborts;
pub mod campaign;
pub mod cells;
pub mod client;
pub mod nodes;
mod options;
pub mod readiness;
pub mod report;
pub mod rig;
pub mod strike;
mod sums;
pub mod verdict;
