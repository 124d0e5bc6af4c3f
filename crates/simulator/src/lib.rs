//! A whole cluster in virtual time: the same `Cluster` and `Scheduler` as the processes run, without sockets, threads or a model.
//!
//! Owns: the virtual clock and its agenda, the shells of coordinator, nodes and links, the costs that stand for the engine. Never
//! decides about serving, computes no token's content, reads no clock. The same scenario gives the same bytes.
//! Read first: `scenario.rs` (what goes in), `outcome.rs` (what comes out), then `world/mod.rs`. Tests: `tests/`.

#![forbid(unsafe_code)]

mod accuracy;
mod arithmetic;
pub mod costs;
pub mod fit;
pub mod intervention;
pub mod outcome;
pub mod scenario;
mod step_costs;
pub mod topology;
mod uncertainty;
mod world;

pub use outcome::Outcome;
pub use scenario::Scenario;

/// Runs a scenario until every request has ended.
///
/// # Errors
/// [`scenario::ScenarioError`]: the scenario's fault; nothing was run.
pub fn simulate(scenario: &Scenario) -> Result<Outcome, scenario::ScenarioError> {
    scenario.check()?;
    Ok(world::World::new(scenario).run())
}
