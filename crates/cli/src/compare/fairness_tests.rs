//! Tests of the fairness list.

use super::*;
use crate::compare::test_kit::comparison;

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

#[test]
fn a_fair_comparison_has_every_field() {
    let fairness = assess(&comparison(), &conduct());
    assert_eq!(fairness.missing(), Vec::<&str>::new());
    let utilisation = fairness.pool_utilisation.expect("told");
    assert!(utilisation.contains("decode-0 50 %"), "{utilisation}");
    let transfer = fairness.transfer_share.expect("told");
    assert!(
        transfer.contains("9 handoffs") && transfer.contains("20.0 %"),
        "{transfer}"
    );
}

#[test]
fn what_was_not_done_stays_empty() {
    let lacks = |change: &dyn Fn(&mut Comparison, &mut Conduct)| {
        let (mut comparison, mut conduct) = (comparison(), conduct());
        change(&mut comparison, &mut conduct);
        assess(&comparison, &conduct).missing()
    };
    assert_eq!(lacks(&|all, _| all.arms[1].resources.cores = 4), ["equal_resources"]);
    assert_eq!(lacks(&|_, conduct| conduct.tuned = None), ["every_arm_tuned"]);
    assert_eq!(lacks(&|_, conduct| conduct.same_edge = None), ["same_edge"]);
    assert_eq!(
        lacks(&|_, conduct| conduct.client_placement = None),
        ["client_placement"]
    );
    assert_eq!(lacks(&|_, conduct| conduct.warm_up_requests = 0), ["warm_up_excluded"]);
    assert_eq!(
        lacks(&|_, conduct| conduct.incomplete = Some("Ctrl-C".into())),
        ["order_and_repeats"]
    );
    assert_eq!(lacks(&|all, _| all.shapes[0].runs.truncate(4)), ["order_and_repeats"]);
    // Now `whole` is the first in each repeat.
    assert_eq!(lacks(&|all, _| all.shapes[0].runs.swap(2, 3)), ["order_and_repeats"]);
    let first =
        |all: &mut Comparison, change: &dyn Fn(&mut RequestRecord)| change(&mut all.shapes[0].runs[0].run.records[0]);
    let late = |record: &mut RequestRecord| record.sent = Duration::from_millis(400);
    assert_eq!(lacks(&|all, _| first(all, &late)), ["open_loop_and_lag"]);
    assert_eq!(
        lacks(&|all, _| all.shapes[0].runs[0].run.loop_kind = LoopKind::Closed),
        ["open_loop_and_lag"]
    );
    assert_eq!(
        lacks(&|all, _| first(all, &|record| record.output_hash = Some(99))),
        ["outputs_equal"]
    );
    assert_eq!(
        lacks(&|all, _| first(all, &|record| record.output_tokens = 7)),
        ["one_token_per_event"]
    );
    assert_eq!(
        lacks(&|all, _| first(all, &|record| record.prompt_tokens = 7)),
        ["same_trace"]
    );
    assert_eq!(lacks(&|all, _| all.arms[0].settings.clear()), ["pool_utilisation"]);
    let untold = |all: &mut Comparison| {
        let records = all.shapes[0].runs.iter_mut().flat_map(|run| &mut run.run.records);
        records.for_each(|record| record.server = None);
    };
    assert_eq!(lacks(&|all, _| untold(all)), ["transfer_share"]);
}

#[test]
fn an_answer_that_failed_in_one_arm_is_no_difference_of_outputs() {
    let mut all = comparison();
    let record = &mut all.shapes[0].runs[0].run.records[0];
    record.outcome = Outcome::Failed {
        error: "reset".to_owned(),
    };
    record.output_hash = Some(99);
    let fairness = assess(&all, &conduct());
    assert!(fairness.outputs_equal.is_some());
    let failures = fairness.failures_counted.expect("told");
    assert!(
        failures.starts_with("1 failed, 0 refused and 0 cancelled of 18"),
        "{failures}"
    );
}

#[test]
fn only_shapes_that_were_measured_are_named() {
    let mut all = comparison();
    let mut second = all.shapes[0].clone();
    second.name = "another".to_owned();
    all.shapes.push(second);
    let names = |all: &Comparison| assess(all, &conduct()).several_shapes.expect("a shape was measured");
    let both = names(&all);
    assert!(both.contains("short") && both.contains("another"), "{both}");
    all.shapes[1].runs.clear();
    let one = names(&all);
    assert!(one.contains("short") && !one.contains("another"), "{one}");
}

#[test]
fn nothing_was_done_without_runs() {
    let mut all = comparison();
    all.shapes[0].runs.clear();
    assert_eq!(assess(&all, &conduct()).missing().len(), 15);
}

#[test]
fn declared_resources_are_named_so() {
    let mut all = comparison();
    for arm in &mut all.arms {
        arm.resources.is_measured = false;
    }
    let equal = assess(&all, &conduct()).equal_resources.expect("equal");
    assert!(equal.contains(DECLARED), "{equal}");
}
