//! `docs/reference/metrics.md`, made from the tables. `cargo run -p service-runtime --example metrics_doc` prints it.

use std::fmt::Write as _;

use super::{Kind, Metric, Role, Values, table, vllm};

const HEAD: &str = "\
# Metrics

Each process serves `/metrics` in OpenMetrics text: the coordinator on its API port and its membership port, a node on its
one port. A histogram has the series `_bucket`, `_sum` and `_count` of the name given here. A counter whose labels have only
values that this page lists has every series from the start, at 0. No label has one value per request. `baton_ttft_seconds` and
`baton_itl_seconds` carry the trace id of a request as exemplar. [The glossary](../../GLOSSARY.md) explains the terms.

This page is generated from `crates/service-runtime/src/metrics/`; a test fails when the two differ:
`cargo run -p service-runtime --example metrics_doc > docs/reference/metrics.md`.
";

const ALIASES: &str = "
## vLLM's names

Off by default. `baton up --vllm-metrics`, or `vllm_metrics = true` of one process, exposes these metrics beside the others,
for dashboards, autoscalers and gateways that read vLLM's names. `engine` is always `0`, because a process has one engine.
The edges of buckets are vLLM's.

vLLM counts `prompt_tokens`, `generation_tokens` and `time_to_first_token_seconds` while a request runs; baton counts them when
the request ends. Times are those that the client sees, measured at the coordinator: the way to the nodes is part of them.
";

const MISSING: &str = "
## What is missing on purpose

- No label has one value per request, user or prompt. [Records](records.md) and traces show single requests.
- `baton_stage_requests` has no `route`, `commit`, `first_token_return` and `egress`. The first two are moments, and the third
  is known only when it is over. `baton_itl_stalls_total{cause=\"egress_back_pressure\"}` shows clients that read slowly.
- Of vLLM's: `spec_decode_num_drafts` and its figures by position (guesses are counted by token); LoRA, multi-modal and sleep metrics
  (baton has none of these); `nixl_*` and
  `external_prefix_cache_*` (KV travels another way, `baton_kv_transfer_*`); `num_requests_waiting_by_reason` (there is one
  reason: no room); `request_params_*`, `request_max_num_generation_tokens`, `prompt_tokens_by_source` and
  `estimated_*` (not measured); `kv_block_*` (blocks are counted by state, `baton_kv_blocks`); `http_*` (the access log).
";

/// The whole page.
pub fn page() -> String {
    let mut page = HEAD.to_owned();
    for (title, roles) in [
        ("All three processes", Role::ALL.to_vec()),
        ("Coordinator", vec![Role::Coordinator]),
        ("Coordinator and decode node", vec![Role::Coordinator, Role::Decode]),
        ("Both kinds of node", vec![Role::Prefill, Role::Decode]),
        ("Prefill node", vec![Role::Prefill]),
        ("Decode node", vec![Role::Decode]),
    ] {
        section(&mut page, (title, "##"), table::ALL.iter().filter(|m| m.roles == roles));
    }
    page.push_str(ALIASES);
    for (title, roles) in [
        ("All three processes", Role::ALL.to_vec()),
        ("Coordinator", vec![Role::Coordinator]),
        ("Both kinds of node", vec![Role::Prefill, Role::Decode]),
    ] {
        section(&mut page, (title, "###"), vllm::ALL.iter().filter(|m| m.roles == roles));
    }
    page.push_str(MISSING);
    page
}

fn section<'a>(page: &mut String, (title, level): (&str, &str), metrics: impl Iterator<Item = &'a Metric>) {
    let metrics: Vec<&Metric> = metrics.collect();
    if metrics.is_empty() {
        return;
    }
    let _ = writeln!(page, "\n{level} {title}\n");
    page.push_str("| name | kind | labels | unit | meaning |\n|---|---|---|---|---|\n");
    for m in &metrics {
        let names: Vec<String> = m.labels.iter().map(|label| format!("`{}`", label.name)).collect();
        let (kind, names, unit) = (m.kind.name(), names.join(", "), m.unit.name());
        let _ = writeln!(page, "| `{}` | {kind} | {names} | {unit} | {} |", as_seen(m), m.help);
    }
    lists(page, "Values of labels:", metrics.iter().flat_map(|m| values(m)));
    lists(page, "Edges of buckets:", metrics.iter().filter_map(|m| edges(m)));
}

/// The name that a query uses.
fn as_seen(metric: &Metric) -> String {
    match metric.kind {
        Kind::Counter => format!("{}_total", metric.name),
        Kind::Gauge | Kind::Histogram => metric.name.to_owned(),
    }
}

/// A list with one line for each text, and the names for which it holds.
fn lists<'a>(page: &mut String, title: &str, lines: impl Iterator<Item = (String, &'a str)>) {
    let mut texts: Vec<(String, Vec<&str>)> = Vec::new();
    for (text, name) in lines {
        match texts.iter_mut().find(|(known, _)| *known == text) {
            Some((_, names)) => names.push(name),
            None => texts.push((text, vec![name])),
        }
    }
    if texts.is_empty() {
        return;
    }
    let _ = writeln!(page, "\n{title}\n");
    for (text, names) in texts {
        let names: Vec<String> = names.iter().map(|name| format!("`{name}`")).collect();
        let _ = writeln!(page, "- {text} ({})", names.join(", "));
    }
}

/// Each label of a metric with its values; for each process where they differ.
fn values(metric: &Metric) -> Vec<(String, &'static str)> {
    let words = |values: Vec<&str>| {
        let values: Vec<String> = values.iter().map(|value| format!("`{value}`")).collect();
        values.join(", ")
    };
    let of = |label: &super::Label| match label.values {
        Values::OfProcess(what) | Values::Open(what) => vec![format!("`{}`: {what}", label.name)],
        Values::Closed(values) => {
            let first = metric.roles.first().map(|role| values(*role)).unwrap_or_default();
            if metric.roles.iter().all(|role| values(*role) == first) {
                return vec![format!("`{}`: {}", label.name, words(first))];
            }
            let by_role = metric.roles.iter();
            by_role
                .map(|role| format!("`{}` on a {}: {}", label.name, process(*role), words(values(*role))))
                .collect()
        }
    };
    let lines = metric.labels.iter().flat_map(of);
    lines.map(|line| (line, metric.name)).collect()
}

fn process(role: Role) -> &'static str {
    match role {
        Role::Coordinator => "coordinator",
        Role::Prefill => "prefill node",
        Role::Decode => "decode node",
    }
}

fn edges(metric: &Metric) -> Option<(String, &'static str)> {
    let edges: Vec<String> = metric.edges.iter().map(ToString::to_string).collect();
    (!edges.is_empty()).then(|| (edges.join(" "), metric.name))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn the_page_is_what_the_tables_say() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/reference/metrics.md");
        let written = std::fs::read_to_string(path).expect("docs/reference/metrics.md");
        let advice = "run `cargo run -p service-runtime --example metrics_doc > docs/reference/metrics.md`";
        assert!(
            written == page(),
            "docs/reference/metrics.md is not what the tables say: {advice}"
        );
    }

    #[test]
    fn no_line_is_left_out_of_the_page() {
        let page = page();
        for metric in table::ALL.iter().chain(vllm::ALL) {
            let line = format!("| `{}` | {} |", as_seen(metric), metric.kind.name());
            assert!(page.contains(&line), "{line}");
        }
    }

    #[test]
    fn every_line_is_sound() {
        let mut seen = BTreeSet::new();
        for metric in table::ALL.iter().chain(vllm::ALL) {
            let name = metric.name;
            for role in metric.roles {
                assert!(
                    seen.insert((name, *role)),
                    "{name} is twice in the tables of a {}",
                    role.name()
                );
            }
            assert!(!metric.roles.is_empty() && !metric.help.is_empty(), "{name}");
            assert!(!metric.help.ends_with('.'), "{name}: the exposition adds the full stop");
            assert_eq!(
                metric.kind == Kind::Histogram,
                !metric.edges.is_empty(),
                "{name}: edges"
            );
            assert!(
                metric.edges.windows(2).all(|pair| pair[0] < pair[1]),
                "{name}: edges ascend"
            );
            for role in metric.roles {
                for label in metric.labels {
                    let values = metric.closed_values(label.name, *role).unwrap_or_default();
                    let distinct: BTreeSet<&str> = values.iter().copied().collect();
                    assert_eq!(distinct.len(), values.len(), "{name}: {} has a value twice", label.name);
                }
            }
        }
    }
}
