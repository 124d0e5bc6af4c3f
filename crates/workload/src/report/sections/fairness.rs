//! The fairness list: each field of it, and what is missing.

use crate::comparison::{Comparison, Fairness};
use crate::report::document::{Block, Section, Table, Tone};
use crate::report::view::{Subject, View};

/// Each field with the condition that it stands for.
fn fields(fairness: &Fairness) -> [(&'static str, &Option<String>); 15] {
    [
        ("equal resources", &fairness.equal_resources),
        ("every arm tuned", &fairness.every_arm_tuned),
        ("same coordinator, tokenizer and HTTP path", &fairness.same_edge),
        ("same trace", &fairness.same_trace),
        ("open loop, and the client's lag", &fairness.open_loop_and_lag),
        ("warm-up and cool-down excluded", &fairness.warm_up_excluded),
        ("order of arms, fresh processes, repeats", &fairness.order_and_repeats),
        ("outputs equal across arms", &fairness.outputs_equal),
        ("failures, refusals and cancels counted", &fairness.failures_counted),
        ("one token per event", &fairness.one_token_per_event),
        ("shapes of traffic", &fairness.several_shapes),
        ("placement of the client", &fairness.client_placement),
        ("share of the KV transfer", &fairness.transfer_share),
        ("utilisation of each pool", &fairness.pool_utilisation),
        ("a verdict for each shape", &fairness.verdict_per_shape),
    ]
}

/// The names of the fields that are missing. One of them forbids a verdict.
pub fn missing(comparison: &Comparison) -> Vec<&'static str> {
    let is_missing = |value: &Option<String>| value.as_deref().is_none_or(|text| text.trim().is_empty());
    fields(&comparison.fairness)
        .into_iter()
        .filter(|(_, value)| is_missing(value))
        .map(|(name, _)| name)
        .collect()
}

pub fn section(view: &View<'_>) -> Section {
    let mut section = Section::new("fairness", "Fairness list");
    if view.subject == Subject::Run {
        section.empty("A single run compares nothing, so nothing had to be kept equal.");
        return section;
    }
    let missing = missing(view.comparison);
    let mut table = Table::new("What was kept equal, and how", &["condition", "state", "how"]);
    for (name, value) in fields(&view.comparison.fairness) {
        let cells = |state: &str, how: &str| vec![name.to_owned(), state.to_owned(), how.to_owned()];
        match value {
            Some(how) if !missing.contains(&name) => table.toned(Tone::Good, cells("✓ stated", how)),
            _ => table.toned(
                Tone::Bad,
                cells("✗ missing", "Nothing is recorded. No verdict without it."),
            ),
        }
    }
    section.blocks.push(Block::Table(table));
    section
}
