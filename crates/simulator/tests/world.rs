//! Simulated clusters whose figures can be worked out by hand, and promises that hold whatever happens.

#![forbid(unsafe_code)]

mod scenarios;

use std::time::Duration;

use proptest::prelude::*;
use scenarios::{Planned, scenario};
use simulator::costs::{ByKind, CostsError};
use simulator::intervention::Intervention;
use simulator::scenario::ScenarioError;
use simulator::{Outcome, Scenario, simulate};
use workload::record::{Outcome as Ended, RequestRecord, RunPart};

fn run(scenario: &Scenario) -> Outcome {
    simulate(scenario).expect("a scenario that can be run")
}

/// The promises hold, and every request is answered to its end.
fn run_and_complete(scenario: &Scenario) -> Outcome {
    let outcome = run(scenario);
    check_promises(scenario, &outcome);
    let records = &outcome.run.records;
    assert!(records.iter().all(|record| record.outcome == Ended::Completed));
    outcome
}

fn ms(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

fn ttft_ms(record: &RequestRecord) -> f64 {
    ms(record.tokens[0].saturating_sub(record.scheduled))
}

fn gaps_ms(record: &RequestRecord) -> Vec<f64> {
    let pairs = record.tokens.windows(2);
    pairs.map(|pair| ms(pair[1].saturating_sub(pair[0]))).collect()
}

fn assert_close(got: f64, expected: f64, what: &str) {
    assert!((got - expected).abs() < 0.01, "{what}: {got} ms, by hand {expected} ms");
}

#[test]
fn one_request_on_a_co_located_node_takes_what_its_parts_take() {
    let outcome = run(&scenario("1c", &[Planned::at(0).tokens(100, 4)]));
    let record = &outcome.run.records[0];
    assert_eq!(record.outcome, Ended::Completed);
    assert_eq!(record.tokens.len(), 4);
    // Edge 2 + 100 x 0.01; Open 1; loop 0.5 and one step of 100 tokens: 10 + 100 x 1 + 3 for the draw; back 1; egress 0.25.
    assert_close(ttft_ms(record), 2.0 + 1.0 + 1.0 + 0.5 + 113.0 + 1.0 + 0.25, "TTFT");
    // Loop 0.5; a step of one row: 10 + 2 + 3.
    for gap in gaps_ms(record) {
        assert_close(gap, 15.5, "ITL");
    }
    assert_eq!(outcome.totals.handoffs, 0);
    assert_eq!(outcome.totals.local_prefills.get("co_located"), Some(&1));
}

#[test]
fn one_request_over_two_nodes_pays_for_open_prefill_and_the_link() {
    let outcome = run(&scenario("1p1d", &[Planned::at(0).tokens(100, 4)]));
    let record = &outcome.run.records[0];
    // As above, with Open and its answer, Prefill, and the token's way back.
    let ttft = 2.0 + 1.0 + 2.0 + 1.0 + 0.5 + 113.0 + 1.0 + 0.25;
    assert_close(ttft_ms(record), ttft, "TTFT");
    // The push begins when the prompt is computed: 7 blocks of 16,000 bytes at 1 MB/s take 112 ms, then 1 ms of latency, 2 ms for the
    // commit, and the decode node's first step.
    let gaps = gaps_ms(record);
    assert_close(gaps[0], 112.0 + 1.0 + 2.0 + 15.5, "first gap");
    assert_close(gaps[1], 15.5, "ITL");
    assert_eq!(outcome.totals.handoffs, 1);
    let server = record.server.as_ref().expect("told by the coordinator");
    assert_eq!(server.kv_bytes, Some(112_000));
    assert_close(server.kv_transfer_ms.unwrap_or_default(), 112.0, "transfer");
    let told: f64 = server
        .stages
        .iter()
        .take_while(|(stage, _)| stage != "transfer_tail")
        .map(|(_, ms)| ms)
        .sum();
    assert_close(told, ttft, "the stages add up to TTFT");
}

#[test]
fn a_transfer_that_breaks_off_counts_only_the_bytes_that_moved() {
    let mut with = scenario("1p2d", &[Planned::at(0).tokens(100, 4)]);
    let whole = run(&with);
    assert_eq!(whole.nodes[0].kv_bytes_sent, 112_000);
    let told = whole.run.records[0].server.as_ref();
    let receiver = told.and_then(|server| server.decode_node.clone());
    let receiver = receiver.expect("it was handed over");
    // As above, the bytes begin to move at 2 + 1 + 2 + 1 + 0.5 + 113 ms. 1 MB/s are 1,000 bytes a millisecond.
    with.interventions = vec![Intervention::fail(&format!("{receiver}@150ms")).expect("a failure")];
    let broken = run_and_complete(&with);
    let handed_over = broken.run.records[0].server.as_ref().and_then(|server| server.kv_bytes);
    let broken_off = broken.nodes[0].kv_bytes_sent - handed_over.unwrap_or(0);
    assert!((30_000..31_000).contains(&broken_off), "{broken_off}");
}

#[test]
fn a_hold_ends_when_it_is_over_and_not_up_to_a_second_later() {
    let mut with = scenario("1p1d", &[Planned::at(0).tokens(100, 4)]);
    // 10 bytes a millisecond: no push of 112,000 bytes is done in time.
    with.costs.link.bytes_per_second = 1e4;
    with.nodes.hold = Duration::from_millis(500);
    with.cluster.attempts_max = 1;
    let outcome = run(&with);
    check_promises(&with, &outcome);
    // Its bytes move from the beginning of the hold to the end of it.
    let sent = outcome.nodes[0].kv_bytes_sent;
    assert!((4_900..5_100).contains(&sent), "{sent}");
}

#[test]
fn a_second_prompt_waits_for_the_first_and_a_shared_prefix_is_not_computed_again() {
    let first = Planned::at(0).tokens(64, 2).blocks(&[1, 2, 3, 4]);
    let again = Planned::at(5_000).tokens(64, 2).blocks(&[1, 2, 3, 5]);
    let outcome = run(&scenario("1c", &[first, again]));
    let [cold, warm] = &outcome.run.records[..] else {
        panic!("two records");
    };
    assert_eq!((cold.cached_tokens, warm.cached_tokens), (Some(0), Some(48)));
    assert_close(ttft_ms(cold) - ttft_ms(warm), 48.0, "48 tokens at 1 ms are saved");
}

#[test]
fn steps_after_a_prompt_or_a_pause_take_more_until_the_weights_are_in_the_caches() {
    let cold = |topology| {
        let mut scenario = scenario(
            topology,
            &[Planned::at(0).tokens(100, 4), Planned::at(1_000).tokens(100, 4)],
        );
        scenario.costs.step.cold.seconds = 0.008;
        // Half of it is left after each step.
        scenario.costs.step.cold.steps = 1.0 / std::f64::consts::LN_2;
        run(&scenario)
    };
    // Without it a gap is 15.5; the second answer begins cold again.
    for record in &cold("1c").run.records {
        for (gap, more) in gaps_ms(record).into_iter().zip([8.0, 4.0, 2.0]) {
            assert_close(gap, 15.5 + more, "ITL");
        }
    }
    // A decode node has no prompt between its answers, but a pause.
    for record in &cold("1p1d").run.records {
        assert_close(gaps_ms(record)[2], 15.5 + 2.0, "third gap");
    }
}

#[test]
fn a_prompt_takes_longer_or_shorter_as_a_whole_however_many_chunks_it_has() {
    let ttfts = |chunk_tokens, is_first_asked_before: bool| {
        let lone = (1..20).map(|number| Planned::at(number * 5_000).tokens(512, 1));
        let before = Planned::at(0).tokens(if is_first_asked_before { 40 } else { 512 }, 3);
        let planned: Vec<Planned> = [before].into_iter().chain(lone).collect();
        let mut scenario = scenario("1c", &planned);
        scenario.nodes.limits.max_batch_tokens = chunk_tokens;
        let costs = &mut scenario.costs;
        (costs.step.fixed_seconds, costs.overheads.loop_seconds) = (0.0, 0.0);
        costs.step.draw_seconds = 0.0;
        costs.step.prompt_variation = 0.3;
        let records = run(&scenario).run.records;
        let ttfts: Vec<f64> = records[1..].iter().map(ttft_ms).collect();
        ttfts
    };
    let whole = ttfts(512, false);
    let spread = whole.iter().copied().fold(0.0, f64::max) - whole.iter().copied().fold(f64::MAX, f64::min);
    assert!(spread > 100.0, "they vary: {whole:?}");
    for (other, what) in [
        (ttfts(64, false), "eight chunks"),
        (ttfts(512, true), "other steps before"),
    ] {
        for (whole, other) in whole.iter().zip(other) {
            assert_close(other, *whole, what);
        }
    }
}

/// All steps beside all others.
fn slowed_down(times: f64) -> ByKind<ByKind<f64>> {
    ByKind::of_each(|_| ByKind::of_each(|_| times))
}

#[test]
fn nodes_of_one_machine_slow_each_other_down_by_what_they_do() {
    let planned = [Planned::at(0).tokens(100, 4), Planned::at(0).tokens(100, 4)];
    let mut shared = scenario("2c", &planned);
    shared.costs.host.nodes_per_host = 2;
    let mut slowdown = slowed_down(1.5);
    slowdown.reading.reading = 1.2;
    shared.costs.host.slowdown = vec![slowdown];
    let (apart, shared) = (run(&scenario("2c", &planned)), run(&shared));
    let loop_and_step = 113.5;
    for (apart, shared) in apart.run.records.iter().zip(&shared.run.records) {
        assert_close(
            ttft_ms(shared) - ttft_ms(apart),
            loop_and_step * 0.5,
            "half as long again",
        );
        assert_close(gaps_ms(shared)[1], 15.5 * 1.2, "decoding beside decoding");
    }
}

#[test]
fn a_turn_waits_for_the_answer_before_it() {
    let turns = [
        Planned::at(0).tokens(100, 3).turn(0, 0),
        Planned::at(1).tokens(20, 2).turn(1, 250),
    ];
    let outcome = run(&scenario("1c", &turns));
    let [first, second] = &outcome.run.records[..] else {
        panic!("two records");
    };
    assert_close(ms(second.scheduled - first.ended), 250.0, "the client thinks");
}

#[test]
fn turns_that_are_due_before_the_answers_ahead_of_them_are_sent_one_after_the_other() {
    // The trace does not have the conversation's first turn.
    let turns = [
        Planned::at(0).tokens(100, 3).turn(1, 0),
        Planned::at(1).tokens(20, 2).turn(2, 250),
        Planned::at(2).tokens(20, 2).turn(3, 250),
    ];
    let outcome = run_and_complete(&scenario("1c", &turns));
    for pair in outcome.run.records.windows(2) {
        assert_close(ms(pair[1].scheduled - pair[0].ended), 250.0, "the client thinks");
    }
}

#[test]
fn the_parts_of_a_run_are_those_of_the_load_client() {
    let mut with = scenario(
        "1c",
        &[
            Planned::at(0).tokens(100, 3),
            Planned::at(3_000).tokens(100, 3).turn(0, 0),
            Planned::at(3_001).tokens(20, 2).turn(1, 2_000),
        ],
    );
    (with.warm_up, with.cool_down) = (Duration::from_secs(1), Duration::from_secs(1));
    let run = run_and_complete(&with).run;
    let parts: Vec<RunPart> = run.records.iter().map(|record| record.part).collect();
    assert_eq!(parts, [RunPart::WarmUp, RunPart::Measured, RunPart::CoolDown]);
    // From the end of the warm-up to the beginning of the cool-down, which is before the time at which the last turn was due, and not
    // before the time of the trace.
    let due = run.records[2].scheduled;
    assert!(due > Duration::from_secs(5), "{due:?}");
    assert_eq!(run.measured, due - Duration::from_secs(2));
}

#[test]
fn requests_of_a_node_that_fails_end_elsewhere() {
    let planned: Vec<Planned> = (0..20).map(|i| Planned::at(i * 40).tokens(60, 60)).collect();
    let mut with = scenario("2p2d", &planned);
    with.interventions = vec![
        Intervention::fail("decode-1@700ms+3s").expect("a failure"),
        Intervention::fail("prefill-0@900ms").expect("a failure"),
    ];
    let outcome = run_and_complete(&with);
    assert!(outcome.totals.migrations > 0, "{:?}", outcome.totals);
    assert!(outcome.run.records.iter().all(|record| record.tokens.len() == 60));
}

#[test]
fn a_standstill_shows_in_full_and_a_long_one_is_a_loss() {
    let planned = [Planned::at(0).tokens(50, 100)];
    let mut short = scenario("1c", &planned);
    short.interventions = vec![Intervention::pause("decode-0@600ms+2s").expect("a pause")];
    let outcome = run(&short);
    let longest = gaps_ms(&outcome.run.records[0]).into_iter().fold(0.0, f64::max);
    assert_close(longest, 2_000.0 + 15.5, "the longest gap");
    let mut long = scenario("2c", &planned);
    long.interventions = vec![Intervention::pause("decode-0@600ms+9s").expect("a pause")];
    let outcome = run(&long);
    check_promises(&long, &outcome);
    assert_eq!(outcome.totals.nodes_lost, 1);
    assert_eq!(outcome.run.records[0].outcome, Ended::Completed);
    // The lease of 5 s runs from the last status.
    let longest = gaps_ms(&outcome.run.records[0]).into_iter().fold(0.0, f64::max);
    assert!((4_700.0..5_300.0).contains(&longest), "{longest}");
}

#[test]
fn a_node_that_stands_still_is_not_busy() {
    let planned = [Planned::at(0).tokens(50, 100)];
    let busy = |topology, interventions| {
        let mut with = scenario(topology, &planned);
        with.interventions = interventions;
        ms(run(&with).nodes[0].busy)
    };
    let pause = || Intervention::pause("decode-0@600ms+2s").expect("a pause");
    // The same steps, one of them with a pause in it.
    assert_close(busy("1c", vec![pause()]), busy("1c", Vec::new()), "busy");
    // It fails before the pause is over, so it computed until the pause began.
    let failure = Intervention::fail("decode-0@1600ms").expect("a failure");
    let until_the_pause = busy("2c", vec![pause(), failure]);
    assert!((500.0..600.0).contains(&until_the_pause), "{until_the_pause}");
}

#[test]
fn a_drain_and_a_change_of_role_lose_nothing() {
    let planned: Vec<Planned> = (0..30).map(|i| Planned::at(i * 100).tokens(60, 20)).collect();
    let mut with = scenario("2p2d", &planned);
    with.interventions = vec![
        Intervention::role("prefill-1=decode@500ms").expect("a role"),
        Intervention::drain("decode-0@1500ms").expect("a drain"),
    ];
    let outcome = run_and_complete(&with);
    assert_eq!(outcome.nodes[1].role, "decode");
    assert_eq!(outcome.totals.nodes_lost, 0);
}

#[test]
fn every_prompt_of_two_pools_is_handed_over_and_short_ones_are_not_where_they_need_not_be() {
    let planned: Vec<Planned> = (0..12)
        .map(|i| Planned::at(i * 50).tokens(if i % 3 == 0 { 20 } else { 200 }, 5))
        .collect();
    let outcome = run(&scenario("1p1d", &planned));
    assert_eq!(outcome.totals.handoffs, 12);
    let mut conditional = scenario("1p1d", &planned);
    conditional.cluster.local_prefill_below_tokens = 64;
    let outcome = run(&conditional);
    assert_eq!(
        (outcome.totals.handoffs, outcome.totals.local_prefills.get("short")),
        (8, Some(&4))
    );
}

#[test]
fn a_scenario_that_cannot_be_run_says_why() {
    let good = scenario("1p1d", &[Planned::at(0).tokens(10, 2)]);
    let refused = |change: &dyn Fn(&mut Scenario)| {
        let mut bad = good.clone();
        change(&mut bad);
        simulate(&bad).expect_err("refused")
    };
    assert_eq!(refused(&|s| s.trace.requests.clear()), ScenarioError::EmptyTrace);
    let too_long = refused(&|s| s.trace.requests[0].prompt_tokens = 1_000_000);
    assert!(
        matches!(too_long, ScenarioError::TooLong { index: 0, .. }),
        "{too_long}"
    );
    let unknown = Intervention::fail("decode-9@1s").expect("a failure");
    let name = "decode-9".to_owned();
    let no_such_node = ScenarioError::NoSuchNode { name };
    assert_eq!(refused(&|s| s.interventions.push(unknown.clone())), no_such_node);
    let no_rate = CostsError::NotPositive {
        field: "link.bytes_per_second",
        value: 0.0,
    };
    let no_rate = ScenarioError::Costs(no_rate);
    assert_eq!(refused(&|s| s.costs.link.bytes_per_second = 0.0), no_rate);
    let no_blocks = refused(&|s| s.nodes.limits.kv_blocks = 0);
    assert!(matches!(no_blocks, ScenarioError::Zero { .. }), "{no_blocks}");
    assert!(no_blocks.to_string().contains("--kv-cache-memory"), "{no_blocks}");
}

/// What holds whatever happens: every request ends once, no block is left, and nothing is said twice.
fn check_promises(scenario: &Scenario, outcome: &Outcome) {
    assert_eq!(
        outcome.run.records.len(),
        scenario.trace.requests.len(),
        "each request ends exactly once"
    );
    assert_eq!(outcome.totals.blocks_left, 0, "{:?}", outcome.totals);
    assert_eq!(outcome.totals.violations, 0, "{:?}", outcome.totals);
    for (record, planned) in outcome.run.records.iter().zip(&scenario.trace.requests) {
        assert!(record.tokens.is_sorted());
        assert!(record.tokens.iter().all(|at| *at <= record.ended), "{}", record.id);
        assert!(record.tokens.len() <= planned.output_tokens as usize);
        if record.outcome == Ended::Completed {
            assert_eq!(record.tokens.len(), planned.output_tokens as usize, "{}", record.id);
        }
    }
}

fn any_planned() -> impl Strategy<Value = Vec<Planned>> {
    let one = (0_u64..400, 1_u32..300, 1_u32..30, prop::option::of(0_u64..4));
    prop::collection::vec(one, 1..30).prop_map(|requests| {
        let mut at = 0;
        let mut planned = Vec::new();
        for (gap, prompt, output, prefix) in requests {
            at += gap;
            let one = Planned::at(at).tokens(prompt, output);
            planned.push(match prefix {
                Some(first) => one.blocks(&[first, first + 10]),
                None => one,
            });
        }
        planned
    })
}

fn any_interventions() -> impl Strategy<Value = Vec<(u8, u8, u64, u64)>> {
    prop::collection::vec((0_u8..5, 0_u8..4, 0_u64..4_000, 1_u64..9_000), 0..4)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn whatever_happens_the_promises_hold_and_the_same_seed_gives_the_same_bytes(
        planned in any_planned(),
        interventions in any_interventions(),
        seed in 0_u64..1_000,
        is_streamed in any::<bool>(),
        kv_blocks in 40_u32..200,
    ) {
        let mut with = scenario("2p2d", &planned);
        with.seed = seed;
        with.costs.step.variation = 0.1;
        with.costs.step.prompt_variation = 0.05;
        with.costs.link.is_streamed = is_streamed;
        with.costs.host.nodes_per_host = 2;
        with.costs.host.slowdown = vec![slowed_down(1.3)];
        with.nodes.limits.kv_blocks = kv_blocks;
        for (kind, node, at, lasts) in interventions {
            let node = ["prefill-0", "prefill-1", "decode-0", "decode-1"][node as usize];
            let read = match kind {
                0 => Intervention::fail(&format!("{node}@{at}ms+{lasts}ms")),
                1 => Intervention::fail(&format!("{node}@{at}ms")),
                2 => Intervention::pause(&format!("{node}@{at}ms+{lasts}ms")),
                3 => Intervention::drain(&format!("{node}@{at}ms")),
                _ => Intervention::role(&format!("{node}=decode@{at}ms")),
            };
            with.interventions.push(read.expect("a form that is read"));
        }
        let outcome = run(&with);
        check_promises(&with, &outcome);
        let bytes = |outcome: &Outcome| serde_json::to_vec(outcome).expect("JSON");
        prop_assert_eq!(bytes(&outcome), bytes(&run(&with)));
    }
}
