//! Reads an exposition and compares it with the table, for the tests of the three processes.

use std::collections::{BTreeMap, BTreeSet};

use super::{Kind, Metric, Role, Values};

/// Labels of one series, with their values.
type Series = BTreeMap<String, String>;

/// The part of an exposition about one metric.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Exposed {
    pub kind: String,
    pub help: String,
    pub unit: Option<String>,
    /// Labels without `le`: the buckets of a histogram are one series.
    pub series: BTreeSet<Series>,
    /// Edges of a histogram, without the infinite one.
    pub edges: BTreeSet<String>,
}

/// The metrics of an OpenMetrics text by name, as far as the table has them.
pub fn read(text: &str) -> BTreeMap<String, Exposed> {
    let mut all: BTreeMap<String, Exposed> = BTreeMap::new();
    let mut current = String::new();
    for line in text.lines().filter(|line| *line != "# EOF") {
        if let Some(words) = line.strip_prefix("# ") {
            let mut words = words.splitn(3, ' ');
            let (what, name, rest) = (words.next(), words.next().unwrap_or(""), words.next().unwrap_or(""));
            name.clone_into(&mut current);
            let exposed = all.entry(current.clone()).or_default();
            match what {
                Some("HELP") => rest.clone_into(&mut exposed.help),
                Some("TYPE") => rest.clone_into(&mut exposed.kind),
                Some("UNIT") => exposed.unit = Some(rest.to_owned()),
                _ => {}
            }
        } else if let Some(exposed) = all.get_mut(&current) {
            let mut labels = labels(line);
            if let Some(edge) = labels.remove("le").filter(|edge| edge != "+Inf") {
                exposed.edges.insert(edge);
            }
            exposed.series.insert(labels);
        }
    }
    all
}

/// `name{a="b",c="d"} value`. None of our values has a quote in it.
fn labels(line: &str) -> Series {
    let series = line.split(" # ").next().unwrap_or(line);
    let Some((_, rest)) = series.split_once('{') else {
        return Series::new();
    };
    let inside = rest.rsplit_once('}').map_or(rest, |(inside, _)| inside);
    let pairs = inside.split("\",").filter_map(|pair| pair.split_once("=\""));
    pairs
        .map(|(name, value)| (name.to_owned(), value.trim_end_matches('"').to_owned()))
        .collect()
}

/// The differences between a process's lines in the tables and its exposition. Every metric must have had a value.
pub fn differences(text: &str, role: Role, tables: &[&[Metric]]) -> Vec<String> {
    let exposed = read(text);
    let wanted: Vec<&Metric> = tables.iter().copied().flatten().filter(|m| m.is_on(role)).collect();
    let is_known = |name: &String| wanted.iter().any(|metric| metric.name == *name);
    let unknown = exposed.keys().filter(|name| !is_known(name));
    let mut found: Vec<String> = unknown
        .map(|name| format!("{name} is exposed and not in the table"))
        .collect();
    for metric in wanted {
        match exposed.get(metric.name) {
            Some(exposed) => found.extend(of_metric(metric, exposed, role)),
            None => found.push(format!("{} is in the table and not exposed", metric.name)),
        }
    }
    found
}

fn of_metric(metric: &Metric, exposed: &Exposed, role: Role) -> Vec<String> {
    let mut found = Vec::new();
    let mut differs = |what: &str, has: &str, wants: &str| {
        if has != wants {
            found.push(format!("{}: {what} is {has:?}, in the table {wants:?}", metric.name));
        }
    };
    differs("kind", &exposed.kind, metric.kind.name());
    differs("help", &exposed.help, &format!("{}.", metric.help));
    if let Some(unit) = &exposed.unit {
        differs("unit", unit, metric.unit.name());
    }
    let edges: BTreeSet<String> = metric.edges.iter().map(|edge| format!("{edge:?}")).collect();
    differs("edges", &format!("{:?}", exposed.edges), &format!("{edges:?}"));
    let names = format!("{:?}", metric.labels.iter().map(|l| l.name).collect::<BTreeSet<_>>());
    for series in &exposed.series {
        differs(
            "labels",
            &format!("{:?}", series.keys().collect::<BTreeSet<_>>()),
            &names,
        );
    }
    if exposed.series.is_empty() {
        found.push(format!("{}: it has no series", metric.name));
    }
    for (label, value) in exposed.series.iter().flatten() {
        let closed = metric.closed_values(label, role);
        if closed.is_some_and(|closed| !closed.contains(&value.as_str())) {
            found.push(format!("{}: {label}={value:?} is not in its closed list", metric.name));
        }
    }
    found
}

/// Counters of a process that has done nothing yet, and that lack a series for one of their closed values. Where a label
/// names a node there is no series at the start.
pub fn without_a_start(text: &str, role: Role, tables: &[&[Metric]]) -> Vec<String> {
    let exposed = read(text);
    let mut found = Vec::new();
    let starts = |m: &&Metric| {
        let is_open = m.labels.iter().any(|label| matches!(label.values, Values::Open(_)));
        m.kind == Kind::Counter && m.is_on(role) && !is_open
    };
    for metric in tables.iter().copied().flatten().filter(starts) {
        let series = exposed.get(metric.name).map(|exposed| exposed.series.clone());
        let series = series.unwrap_or_default();
        if series.is_empty() {
            found.push(format!("{} has no series at the start", metric.name));
        }
        for label in metric.labels {
            for value in metric.closed_values(label.name, role).unwrap_or_default() {
                if !series.iter().any(|s| s.get(label.name).is_some_and(|v| v == value)) {
                    found.push(format!(
                        "{}: no series at the start with {}={value}",
                        metric.name, label.name
                    ));
                }
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::super::table;
    use super::*;

    const TEXT: &str = "# HELP baton_shed Requests turned away for want of room or time.\n# TYPE baton_shed counter\n\
        baton_shed_total{lane=\"batch\"} 1\nbaton_shed_total{lane=\"interactive\"} 0\n# EOF\n";

    #[test]
    fn what_is_right_passes_and_each_difference_is_found() {
        let shed: &[&[Metric]] = &[&[table::SHED]];
        let of = |text: &str| differences(text, Role::Coordinator, shed);
        assert_eq!(of(TEXT), [""; 0]);
        assert_eq!(without_a_start(TEXT, Role::Coordinator, shed), [""; 0]);
        for (good, bad) in [
            ("counter", "gauge"),
            ("room or", "space or"),
            ("lane=\"batch\"", "lane=\"night\""),
            ("lane=\"batch\"", "line=\"batch\""),
            ("baton_shed", "baton_sheds"),
        ] {
            assert_ne!(of(&TEXT.replace(good, bad)), [""; 0], "{bad}");
        }
        assert_eq!(of("# EOF\n").len(), 1, "a metric that is not there");
        let later = TEXT.replace("baton_shed_total{lane=\"interactive\"} 0\n", "");
        assert_eq!(without_a_start(&later, Role::Coordinator, shed).len(), 1);
        let itl: &[&[Metric]] = &[&[table::ITL]];
        let edges = "# HELP baton_itl_seconds Gap between two tokens of one choice.\n# TYPE baton_itl_seconds histogram\n\
            baton_itl_seconds_bucket{le=\"0.5\",lane=\"batch\"} 1 # {trace_id=\"0a\"} 0.1\n";
        assert_eq!(differences(edges, Role::Coordinator, itl).len(), 1, "its edges");
    }
}
