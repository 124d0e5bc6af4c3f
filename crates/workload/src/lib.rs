//! Load and its measurement, without IO: traces of requests, arrivals, the records of a run, statistics, comparisons.
//!
//! Who sends the load is not here: `cli/src/bench/` sends it to a server, `simulator` gives it to simulated nodes. Both
//! write the same records, so both have the same reports. Read `trace/mod.rs` first, then `record.rs`.
//! Tests of whole traces and of figures beside numpy are in `tests/`.

#![forbid(unsafe_code)]

pub mod arrivals;
pub mod causes;
pub mod comparison;
pub mod contract;
pub mod diagnosis;
pub mod flight_record;
mod goodput;
pub mod knee;
pub mod lint;
pub mod parts;
pub mod plan;
pub mod prediction;
pub mod prompts;
pub mod record;
pub mod recording;
pub mod report;
pub mod saturation;
pub mod shapes;
pub mod slowdown;
pub mod statistics;
pub mod summary;
#[cfg(test)]
mod test_kit;
mod times;
pub mod trace;
pub mod verdict;
