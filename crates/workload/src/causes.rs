//! Why a request was slow: the part of its time that was longest beside what is usual in its run.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::record::{RequestRecord, Run, ServerRecord};
use crate::statistics::Samples;
use crate::summary::places_free;
use crate::times::ms;

/// What took the time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CauseKind {
    /// The client sent it late.
    Client,
    /// It waited for one of the places of the run (`--max-concurrency`), which slower requests had.
    Place,
    /// It waited at the server.
    Queue,
    /// Its prompt took long to compute.
    Prompt,
    /// Its prompt took long because nothing of it was in a cache, while most prompts of the run were.
    Cold,
    /// Its KV, or its first token, took long to move.
    Transfer,
    /// Its answer was long.
    Answer,
    /// Its tokens came slowly or with stalls.
    SlowTokens,
}

/// The cause, with its evidence.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Cause {
    pub kind: CauseKind,
    /// What this part took.
    pub ms: f64,
    /// What it usually takes in the run.
    pub usual_ms: f64,
    pub words: String,
}

/// Stages before the first token in which a request waits.
const QUEUE: [&str; 6] = ["queue", "route", "reserve", "dispatch", "step_wait", "prefill_queue"];
const PROMPT: [&str; 3] = ["parse", "tokenize", "prefill_forward"];
const FIRST_TOKEN: [&str; 1] = ["first_token_return"];
/// A run in which this share of prompt tokens came from a cache is a warm one.
const WARM_SHARE_MIN: f64 = 0.3;

/// What is usual in a run: the median of each part.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Usual {
    parts: Parts,
    cached_share: f64,
    tpot_ms: f64,
    /// A low percentile: what a token of a prompt takes when nothing is in its way.
    prompt_ms_per_token: f64,
    /// How many requests the client had at a time at most, where that was limited.
    places: Option<u64>,
    /// Where that was limited: when there was a place for a request, by its id.
    place_from: BTreeMap<String, Duration>,
}

/// The parts of a request's time, in milliseconds. They add up to its end-to-end time where the server tells its stages.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Parts {
    client: f64,
    place: f64,
    queue: f64,
    prompt: f64,
    transfer: f64,
    answer: f64,
    slow_tokens: f64,
}

impl Usual {
    pub fn of(run: &Run) -> Self {
        let completed: Vec<&RequestRecord> = run.completed().collect();
        let at = |percent: f64, of: &dyn Fn(&RequestRecord) -> Option<f64>| {
            let samples = Samples::new(completed.iter().filter_map(|record| of(record)));
            samples.percentile(percent).unwrap_or(0.0)
        };
        let mut usual = Self {
            cached_share: at(50.0, &cached_share),
            tpot_ms: at(50.0, &RequestRecord::tpot_ms),
            prompt_ms_per_token: at(10.0, &|record| Some(record.ttft_ms()? / computed(record))),
            parts: Parts::default(),
            places: run.places(),
            place_from: place_from(run),
        };
        let part = |of: fn(&Parts) -> f64| at(50.0, &|record| Some(of(&usual.parts_of(record))));
        usual.parts = Parts {
            client: part(|parts| parts.client),
            place: part(|parts| parts.place),
            queue: part(|parts| parts.queue),
            prompt: part(|parts| parts.prompt),
            transfer: part(|parts| parts.transfer),
            answer: part(|parts| parts.answer),
            slow_tokens: part(|parts| parts.slow_tokens),
        };
        usual
    }

    fn parts_of(&self, record: &RequestRecord) -> Parts {
        let before_sent = record.lag_ms();
        let place_from = self.place_from.get(&record.id).copied().unwrap_or_default();
        let place = ms(place_from.saturating_sub(record.scheduled)).min(before_sent);
        let e2e = record.e2e_ms();
        let waited = record.ttft_ms().unwrap_or(e2e) - before_sent;
        // In a run of many thousand requests the client does not ask the server for their stages.
        let told_stages = record.server.as_ref().filter(|server| !server.stages.is_empty());
        let (queue, prompt, before_first) = match told_stages {
            Some(server) => (sum(server, &QUEUE), sum(server, &PROMPT), sum(server, &FIRST_TOKEN)),
            None => {
                let prompt = waited.min(self.prompt_ms_per_token * computed(record));
                (waited - prompt, prompt, 0.0)
            }
        };
        let rest = e2e - before_sent - waited;
        // The second token waits for the KV. The time beyond a usual gap is the transfer's, where the server says that one was.
        let handoff_gap = record.gaps_ms().next().unwrap_or(0.0) - self.tpot_ms;
        let told = record
            .server
            .as_ref()
            .map_or(0.0, |server| sum(server, &["transfer_tail", "commit", "decode_queue"]));
        let after_first = told.min(handoff_gap.max(0.0));
        let answer = (f64::from(record.output_tokens.saturating_sub(1)) * self.tpot_ms).min(rest - after_first);
        Parts {
            client: before_sent - place,
            place,
            queue,
            prompt,
            transfer: before_first + after_first,
            answer,
            slow_tokens: rest - after_first - answer,
        }
    }

    /// The part that exceeds the usual most. When none does, the longest part.
    pub fn cause(&self, record: &RequestRecord) -> Cause {
        let (parts, usual) = (self.parts_of(record), self.parts);
        let each = [
            (CauseKind::Client, parts.client, usual.client),
            (CauseKind::Place, parts.place, usual.place),
            (CauseKind::Queue, parts.queue, usual.queue),
            (CauseKind::Prompt, parts.prompt, usual.prompt),
            (CauseKind::Transfer, parts.transfer, usual.transfer),
            (CauseKind::Answer, parts.answer, usual.answer),
            (CauseKind::SlowTokens, parts.slow_tokens, usual.slow_tokens),
        ];
        let excess = each.iter().map(|(_, took, usual)| took - usual).fold(0.0, f64::max);
        let weight = |part: &(CauseKind, f64, f64)| if excess > 0.0 { part.1 - part.2 } else { part.1 };
        let (kind, ms, usual_ms) = each
            .into_iter()
            .max_by(|a, b| weight(a).total_cmp(&weight(b)))
            .unwrap_or(each[0]);
        let is_cold = self.cached_share >= WARM_SHARE_MIN
            && cached_share(record).is_some_and(|share| share < self.cached_share / 2.0);
        let kind = if kind == CauseKind::Prompt && is_cold {
            CauseKind::Cold
        } else {
            kind
        };
        Cause {
            kind,
            ms,
            usual_ms,
            words: self.words(kind, record, [ms, usual_ms]),
        }
    }

    fn words(&self, kind: CauseKind, record: &RequestRecord, [ms, usual_ms]: [f64; 2]) -> String {
        let told = record.server.as_ref();
        let mut words = match kind {
            CauseKind::Client => "client: it was sent late".to_owned(),
            CauseKind::Place => match self.places {
                Some(places) => format!("place: it waited while {places} others ran (--max-concurrency)"),
                None => "place: it waited while others ran".to_owned(),
            },
            CauseKind::Queue => match told.and_then(longest_wait) {
                Some(stage) => format!("queue: it waited, longest in {stage}"),
                None => "queue: it waited, and the server does not tell where".to_owned(),
            },
            CauseKind::Prompt => format!("prompt: {} tokens had to be computed", computed(record)),
            CauseKind::Cold => format!(
                "cold: {} of {} prompt tokens were cached, while half of the requests had at least {:.0} %",
                record.cached_tokens.unwrap_or(0),
                record.prompt_tokens,
                self.cached_share * 100.0
            ),
            // The larger half of it.
            CauseKind::Transfer if told.is_some_and(|server| sum(server, &FIRST_TOKEN) > ms / 2.0) => {
                "transfer: its first token was long on the way to the coordinator".to_owned()
            }
            CauseKind::Transfer => match told.and_then(|server| server.kv_bytes) {
                Some(bytes) => format!("transfer: {:.1} MB of KV had to arrive", bytes as f64 / 1e6),
                None => "transfer: its KV had to arrive".to_owned(),
            },
            CauseKind::Answer => format!("answer: it has {} tokens", record.output_tokens),
            CauseKind::SlowTokens => match record.stalls_ms().len() {
                0 => format!("slow tokens: {:.1} ms each", record.tpot_ms().unwrap_or(0.0)),
                stalls => format!(
                    "slow tokens: {stalls} stalls, the longest gap {:.0} ms",
                    record.gaps_ms().fold(0.0, f64::max)
                ),
            },
        };
        // Writing to a string cannot fail.
        let _ = write!(words, "; {ms:.0} ms, usual are {usual_ms:.0} ms");
        words
    }
}

fn place_from(run: &Run) -> BTreeMap<String, Duration> {
    if run.places().is_none() {
        return BTreeMap::new();
    }
    let ids = run.records.iter().map(|record| record.id.clone());
    ids.zip(places_free(run)).collect()
}

fn sum(server: &ServerRecord, names: &[&str]) -> f64 {
    let stages = server.stages.iter().filter(|(name, _)| names.contains(&name.as_str()));
    stages.map(|(_, ms)| ms).sum()
}

fn longest_wait(server: &ServerRecord) -> Option<&str> {
    let waits = server.stages.iter().filter(|(name, _)| QUEUE.contains(&name.as_str()));
    waits.max_by(|a, b| a.1.total_cmp(&b.1)).map(|(name, _)| name.as_str())
}

fn computed(record: &RequestRecord) -> f64 {
    f64::from(
        record
            .prompt_tokens
            .saturating_sub(record.cached_tokens.unwrap_or(0))
            .max(1),
    )
}

fn cached_share(record: &RequestRecord) -> Option<f64> {
    (record.prompt_tokens > 0).then_some(f64::from(record.cached_tokens?) / f64::from(record.prompt_tokens))
}

/// The completed requests of the measured part that took longest from end to end, slowest first.
pub fn slowest(run: &Run, count: usize) -> Vec<&RequestRecord> {
    let mut records: Vec<&RequestRecord> = run.completed().collect();
    records.sort_by(|a, b| b.e2e_ms().total_cmp(&a.e2e_ms()));
    records.truncate(count);
    records
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_kit::{later, request, run};

    /// 20 ms in the queue, 80 ms of prompt, then a token every 10 ms; half of each prompt is cached.
    fn usual(id: u32) -> RequestRecord {
        let stages = [
            ("queue", 20.0),
            ("prefill_forward", 80.0),
            ("transfer_tail", 1.0),
            ("decode", 30.0),
        ];
        RequestRecord {
            cached_tokens: Some(50),
            server: Some(ServerRecord {
                stages: stages.map(|(name, ms)| (name.to_owned(), ms)).to_vec(),
                kv_bytes: Some(2_000_000),
                ..ServerRecord::default()
            }),
            ..request(id, &[100, 110, 120, 130])
        }
    }

    fn stage(record: &mut RequestRecord, name: &str, ms: f64) {
        let stages = &mut record.server.as_mut().unwrap().stages;
        stages
            .iter_mut()
            .find(|stage| stage.0 == name)
            .expect("a known stage")
            .1 = ms;
    }

    /// All tokens from this one on come later by `ms`.
    fn delay(record: &mut RequestRecord, from: usize, ms: u64) {
        for token in &mut record.tokens[from..] {
            *token += Duration::from_millis(ms);
        }
        record.ended += Duration::from_millis(ms);
    }

    fn cause(odd: RequestRecord) -> CauseKind {
        let records = (0..20)
            .map(|id| later(usual(id), f64::from(id) * 200.0))
            .chain([odd])
            .collect();
        let run = run("run", records);
        let slowest = slowest(&run, 1);
        assert_eq!(slowest[0].id, "r-99");
        Usual::of(&run).cause(slowest[0]).kind
    }

    #[test]
    fn a_long_prompt_a_queue_a_cold_cache_and_a_long_answer_are_told_apart() {
        let mut queued = usual(99);
        stage(&mut queued, "queue", 320.0);
        delay(&mut queued, 0, 300);
        assert_eq!(cause(queued), CauseKind::Queue);

        let mut long_prompt = RequestRecord {
            prompt_tokens: 1000,
            cached_tokens: Some(500),
            ..usual(99)
        };
        stage(&mut long_prompt, "prefill_forward", 800.0);
        delay(&mut long_prompt, 0, 720);
        assert_eq!(cause(long_prompt.clone()), CauseKind::Prompt);

        let cold = RequestRecord {
            cached_tokens: Some(0),
            ..long_prompt
        };
        assert_eq!(cause(cold), CauseKind::Cold);

        let mut long_answer = usual(99);
        long_answer
            .tokens
            .extend((0..60).map(|at| Duration::from_millis(140 + at * 10)));
        long_answer.output_tokens = 64;
        assert_eq!(cause(long_answer), CauseKind::Answer);
    }

    #[test]
    fn a_transfer_slow_tokens_and_a_late_client_are_told_apart() {
        let mut moved = usual(99);
        stage(&mut moved, "transfer_tail", 240.0);
        delay(&mut moved, 1, 240);
        assert_eq!(cause(moved), CauseKind::Transfer);

        let mut stalled = usual(99);
        delay(&mut stalled, 2, 240);
        assert_eq!(cause(stalled), CauseKind::SlowTokens);

        let mut late = usual(99);
        late.sent += Duration::from_millis(300);
        delay(&mut late, 0, 300);
        assert_eq!(cause(late), CauseKind::Client);
    }

    #[test]
    fn a_wait_for_a_place_of_the_run_is_told_apart_from_a_late_client() {
        // One at a time, each for 300 ms. All are due at the beginning.
        let turn = |id: u32| RequestRecord {
            scheduled: Duration::ZERO,
            ..later(request(id, &[100, 300]), f64::from(id) * 300.0)
        };
        let mut limited = run("limited", (0..4).map(turn).collect());
        limited.environment.insert("max_concurrency".to_owned(), 1.into());
        let waited = Usual::of(&limited).cause(&limited.records[3]);
        assert_eq!((waited.kind, waited.ms), (CauseKind::Place, 900.0), "{waited:?}");
        let late = &mut limited.records[3];
        late.sent += Duration::from_secs(2);
        delay(late, 0, 2000);
        let late = Usual::of(&limited).cause(&limited.records[3]);
        assert_eq!((late.kind, late.ms), (CauseKind::Client, 2000.0), "{late:?}");
    }

    #[test]
    fn a_first_token_that_is_long_on_its_way_is_not_called_kv() {
        let mut late = usual(99);
        let stages = &mut late.server.as_mut().unwrap().stages;
        stages.push(("first_token_return".to_owned(), 300.0));
        delay(&mut late, 0, 300);
        let mut moved = usual(98);
        stage(&mut moved, "transfer_tail", 240.0);
        delay(&mut moved, 1, 240);
        let run = run("run", (0..20).map(usual).chain([late, moved]).collect());
        let causes = Usual::of(&run);
        let of = |at: usize| causes.cause(&run.records[at]);
        assert_eq!((of(20).kind, of(21).kind), (CauseKind::Transfer, CauseKind::Transfer));
        let (late, moved) = (of(20).words, of(21).words);
        assert!(late.contains("first token") && !late.contains("KV"), "{late}");
        assert!(moved.contains("2.0 MB of KV had to arrive"), "{moved}");
    }

    #[test]
    fn without_the_servers_word_a_wait_is_what_the_prompt_does_not_explain() {
        for server in [None, Some(ServerRecord::default())] {
            let silent = |id, tokens: &[u64]| RequestRecord {
                server: server.clone(),
                ..request(id, tokens)
            };
            let mut records: Vec<RequestRecord> = (0..20).map(|id| silent(id, &[100, 110])).collect();
            records.push(silent(99, &[500, 510]));
            records.push(RequestRecord {
                prompt_tokens: 600,
                ..silent(100, &[600, 610])
            });
            let run = run("run", records);
            let usual = Usual::of(&run);
            let kinds: Vec<CauseKind> = slowest(&run, 2)
                .into_iter()
                .map(|record| usual.cause(record).kind)
                .collect();
            assert_eq!(kinds, [CauseKind::Prompt, CauseKind::Queue]);
        }
    }
}
