//! Tests of what is concluded from runs.

use std::time::Duration;

use workload::comparison::Finding;

use super::*;
use crate::compare::test_kit;

fn conduct() -> Conduct {
    Conduct {
        has_fresh_processes: true,
        tuned: Some("six points each".to_owned()),
        same_edge: Some("one binary".to_owned()),
        client_placement: Some("all cores".to_owned()),
        warm_up_requests: 4,
        ..Conduct::default()
    }
}

/// Two arms with 40 requests in each of three repeats. The streams of the arm `split` have gaps of a tenth.
fn comparison() -> Comparison {
    let mut comparison = test_kit::comparison();
    for (place, run) in comparison.shapes[0].runs.iter_mut().enumerate() {
        let gap = if run.arm == "split" { 4.0 } else { 40.0 };
        let records = (0..40).map(|index| {
            // Runs differ a little, as they do.
            let gap = gap * (1.0 + 0.01 * (place + index) as f64);
            let mut record = test_kit::record(index, &[5.0, 5.0 + gap, 5.0 + 2.0 * gap]);
            let at = Duration::from_millis(250 * index as u64);
            record.scheduled += at;
            record.sent += at;
            record.ended += at;
            record.tokens.iter_mut().for_each(|token| *token += at);
            // Every fourth request is a long prompt.
            record.prompt_tokens = if index % 4 == 0 { 1500 } else { 32 };
            record
        });
        run.run.records = records.collect();
    }
    comparison
}

#[test]
fn streams_without_a_gap_forbid_the_verdict_that_rests_on_them() {
    let mut comparison = comparison();
    for record in comparison.shapes[0]
        .runs
        .iter_mut()
        .flat_map(|run| &mut run.run.records)
    {
        record.tokens.truncate(1);
        record.output_tokens = 1;
    }
    let streams = vec![comparison.shapes[0].name.clone()];
    let refused = conclude(&mut comparison, &conduct(), &streams);
    assert!(
        refused.len() == 1 && refused[0].contains("nothing was measured of whole"),
        "{refused:?}"
    );
    let shape = &comparison.shapes[0];
    assert!(
        shape.contrasts.is_empty() && shape.verdict.starts_with("No verdict:"),
        "{}",
        shape.verdict
    );
}

#[test]
fn the_gaps_of_running_streams_stand_first_where_they_decide() {
    let mut comparison = comparison();
    let streams = vec![comparison.shapes[0].name.clone()];
    assert_eq!(conclude(&mut comparison, &conduct(), &streams), Vec::<String>::new());
    let shape = &comparison.shapes[0];
    let first = &shape.contrasts[0];
    assert_eq!(
        (first.metric.as_str(), first.candidate.as_str()),
        ("streams_itl_ms_p99", "split")
    );
    assert_eq!(first.finding, Finding::Wins, "{first:?}");
    assert!(first.ratio < 0.2, "{first:?}");
    assert!(shape.verdict.starts_with("Running streams:"), "{}", shape.verdict);
    assert!(
        shape
            .contrasts
            .iter()
            .any(|contrast| contrast.metric == "goodput_per_core")
    );
    assert!(shape.runs[0].run.records.len() == 40, "no record is lost");
}

#[test]
fn without_streams_goodput_decides() {
    let mut comparison = comparison();
    assert!(conclude(&mut comparison, &conduct(), &[]).is_empty());
    assert_eq!(comparison.shapes[0].contrasts[0].metric, "goodput_per_core");
}

#[test]
fn the_verdict_on_the_only_shape_says_that_it_holds_for_that_one() {
    let (mut one, mut two) = (comparison(), comparison());
    let mut second = two.shapes[0].clone();
    second.name = "another".to_owned();
    two.shapes.push(second);
    for all in [&mut one, &mut two] {
        assert!(conclude(all, &conduct(), &[]).is_empty());
    }
    let more = one.shapes[0].verdict.strip_prefix(&two.shapes[0].verdict);
    assert!(more.is_some_and(|more| more.contains(&one.shapes[0].name)), "{more:?}");
}

#[test]
fn a_missing_field_and_a_missing_run_forbid_the_verdict() {
    for change in [
        |conduct: &mut Conduct| conduct.same_edge = None,
        |conduct: &mut Conduct| conduct.incomplete = Some("stopped by Ctrl-C".to_owned()),
    ] {
        let (mut comparison, mut conduct) = (comparison(), conduct());
        change(&mut conduct);
        let refused = conclude(&mut comparison, &conduct, &[]);
        assert!(!refused.is_empty());
        assert!(comparison.shapes[0].contrasts.is_empty());
        assert!(
            comparison.shapes[0].verdict.starts_with("No verdict"),
            "{}",
            comparison.shapes[0].verdict
        );
    }
}

#[test]
fn nothing_measured_is_no_verdict() {
    let mut comparison = comparison();
    comparison.shapes.clear();
    assert!(!conclude(&mut comparison, &conduct(), &[]).is_empty());
    comparison.arms.clear();
    assert!(!conclude(&mut comparison, &conduct(), &[]).is_empty());
}
