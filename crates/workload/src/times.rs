//! The times of one request, as every table, plot and verdict takes them: from when it was due, in milliseconds.

use std::time::Duration;

use crate::comparison::Slo;
use crate::record::{LoopKind, Outcome, RequestRecord, Run, RunPart};
use crate::statistics::Samples;

/// A gap is a stall when it is longer than this many times the request's median gap...
const STALL_TIMES_MEDIAN: f64 = 4.0;
/// ...and longer than one frame of a screen at 60 Hz. The coordinator's records use the same multiple, and 16.667 ms.
const STALL_MS_MIN: f64 = 17.0;

/// Events this close together came in one read. A client that parses one event takes a few microseconds, and a model takes longer for a token.
const TOGETHER_MS: f64 = 0.02;
/// An answer with more events than this to a read, in the mean, was held back on its way. Speculative decoding also sends the tokens of a
/// step together, and the engines of the field guess at most about this many.
const EVENTS_TOGETHER_MAX: usize = 8;

/// Which limits of an SLO a request met.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Met {
    pub ttft: bool,
    pub itl: bool,
}

impl Met {
    pub fn both(self) -> bool {
        self.ttft && self.itl
    }
}

impl RequestRecord {
    pub fn is_measured(&self) -> bool {
        self.part == RunPart::Measured
    }
    pub fn is_completed(&self) -> bool {
        self.outcome == Outcome::Completed
    }
    /// How long after its due time the client sent it.
    pub fn lag_ms(&self) -> f64 {
        ms(self.sent.saturating_sub(self.scheduled))
    }
    /// From the due time to the first token.
    pub fn ttft_ms(&self) -> Option<f64> {
        self.since_due(self.tokens.first())
    }
    /// From the due time to the second token. With disaggregation the second token comes from another node than the first.
    pub fn second_token_ms(&self) -> Option<f64> {
        self.since_due(self.tokens.get(1))
    }
    /// False when the events came all at once, or nearly so: the server or a proxy collected them and sent them at the end, and nobody
    /// knows when the model made each token. True when there is no gap.
    pub fn are_gaps_known(&self) -> bool {
        let apart = self.spaces_ms().filter(|space| *space > TOGETHER_MS).count();
        match self.tokens.len() {
            0 | 1 => true,
            events => apart > 0 && events <= EVENTS_TOGETHER_MAX * (apart + 1),
        }
    }
    /// (last token - first token) / (output tokens - 1), as vLLM and OpenTelemetry divide. `None` where the gaps are not known.
    pub fn tpot_ms(&self) -> Option<f64> {
        if !self.are_gaps_known() {
            return None;
        }
        let (first, last) = (self.tokens.first()?, self.tokens.last()?);
        let gaps = f64::from(self.output_tokens.checked_sub(1).filter(|gaps| *gaps > 0)?);
        (self.tokens.len() > 1).then(|| ms(last.saturating_sub(*first)) / gaps)
    }
    /// Each gap between two events with a token. None where they are not known.
    pub fn gaps_ms(&self) -> impl Iterator<Item = f64> + '_ {
        let are_known = self.are_gaps_known();
        self.spaces_ms().filter(move |_| are_known)
    }
    fn spaces_ms(&self) -> impl Iterator<Item = f64> + '_ {
        self.tokens.windows(2).map(|pair| ms(pair[1].saturating_sub(pair[0])))
    }
    /// Such an answer has no gap that a limit could be for. llama-server sends one more event with its end.
    pub fn has_one_token(&self) -> bool {
        matches!(self.tokens.len(), 1 | 2) && self.output_tokens <= 1
    }
    /// From the due time to the last token; to the end of the answer when it had no token.
    pub fn e2e_ms(&self) -> f64 {
        ms(self.tokens.last().unwrap_or(&self.ended).saturating_sub(self.scheduled))
    }
    /// A request that did not complete meets nothing. An answer of one token has no gap, so it meets the limit for gaps. One of several
    /// tokens that came in one event or at one time does not: nobody knows its gaps.
    pub fn met(&self, slo: &Slo) -> Met {
        if !self.is_completed() {
            return Met {
                ttft: false,
                itl: false,
            };
        }
        let gap = Samples::new(self.gaps_ms()).percentile(99.0);
        Met {
            ttft: self.ttft_ms().is_some_and(|ttft| ttft <= slo.ttft_ms_max),
            itl: gap.map_or(self.has_one_token(), |gap| gap <= slo.itl_ms_max),
        }
    }
    /// Lengths of the gaps that count as stalls.
    pub fn stalls_ms(&self) -> Vec<f64> {
        let Some(median) = Samples::new(self.gaps_ms()).percentile(50.0) else {
            return Vec::new();
        };
        let limit = (STALL_TIMES_MEDIAN * median).max(STALL_MS_MIN);
        self.gaps_ms().filter(|gap| *gap > limit).collect()
    }
    fn since_due(&self, at: Option<&Duration>) -> Option<f64> {
        Some(ms(at?.saturating_sub(self.scheduled)))
    }
}

impl Run {
    /// Of an open loop in which only so many requests could run at a time: how many.
    pub(crate) fn places(&self) -> Option<u64> {
        let limit = self.environment.get("max_concurrency")?.as_u64();
        limit.filter(|_| self.loop_kind == LoopKind::Open)
    }

    /// The measured requests that completed.
    pub(crate) fn completed(&self) -> impl Iterator<Item = &RequestRecord> {
        self.records
            .iter()
            .filter(|record| record.is_measured() && record.is_completed())
    }
}

pub(crate) fn ms(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_kit::{request, slo};

    #[test]
    fn times_count_from_the_due_time_and_not_from_the_moment_of_sending() {
        let mut record = request(1, &[110, 130, 140]);
        record.scheduled = Duration::from_millis(10);
        record.sent = Duration::from_millis(60);
        assert_eq!(record.lag_ms(), 50.0);
        assert_eq!(record.ttft_ms(), Some(100.0));
        assert_eq!(record.second_token_ms(), Some(120.0));
        assert_eq!(record.tpot_ms(), Some(15.0));
        assert_eq!(record.e2e_ms(), 130.0);
        assert_eq!(record.gaps_ms().collect::<Vec<_>>(), [20.0, 10.0]);
    }

    #[test]
    fn an_answer_of_one_token_has_no_tpot_and_one_without_tokens_meets_nothing() {
        let one = request(1, &[50]);
        assert_eq!(one.tpot_ms(), None);
        assert!(one.met(&slo(50.0, 1.0)).both());
        let mut whole = one.clone();
        whole.output_tokens = 20;
        assert!(!whole.met(&slo(50.0, 1e9)).itl, "20 tokens in one event");
        let mut with_an_end = request(1, &[50, 50]);
        with_an_end.output_tokens = 1;
        assert!(
            with_an_end.met(&slo(50.0, 1.0)).both(),
            "one token, and an event that ends it"
        );
        let none = request(2, &[]);
        assert_eq!(
            none.met(&slo(1e9, 1e9)),
            Met {
                ttft: false,
                itl: false
            }
        );
    }

    #[test]
    fn the_gaps_of_an_answer_that_came_at_once_are_not_known() {
        let is_known = |record: &RequestRecord| {
            let known = record.are_gaps_known();
            let judged = record.met(&slo(1e9, 50.0)).itl;
            assert_eq!((record.tpot_ms().is_some(), judged), (known, known), "{record:?}");
            assert_eq!(
                record.gaps_ms().count(),
                if known { record.tokens.len() - 1 } else { 0 }
            );
            known
        };
        assert!(!is_known(&request(1, &[900; 64])));
        // The same in three reads of a large answer.
        let reads: Vec<u64> = (0..96).map(|event| 900 + event / 32).collect();
        assert!(!is_known(&request(2, &reads)));
        // Chunk by chunk out of one read.
        let mut chunks = request(3, &[900; 64]);
        for (at, token) in (0..).zip(&mut chunks.tokens) {
            *token += Duration::from_micros(3 * at);
        }
        assert!(!is_known(&chunks));
        // Speculative decoding: two and five tokens a step, also when a step ends the answer.
        let steps = |tokens: u64| (0..60).map(|token| 10 + 20 * (token / tokens)).collect::<Vec<u64>>();
        assert!(is_known(&request(4, &steps(2))) && is_known(&request(5, &steps(5))));
        assert!(is_known(&request(6, &[10, 30, 30])));
    }

    #[test]
    fn a_stall_is_long_beside_the_median_and_for_an_eye() {
        // Median gap 2 ms. 12 ms is six times that, but nobody sees it.
        assert_eq!(request(1, &[1, 3, 5, 17, 19]).stalls_ms(), Vec::<f64>::new());
        assert_eq!(request(1, &[1, 3, 5, 23, 25]).stalls_ms(), [18.0]);
        // Median gap 10 ms: 40 ms is not more than four times it.
        assert_eq!(request(1, &[10, 20, 30, 70, 80]).stalls_ms(), Vec::<f64>::new());
        assert_eq!(request(1, &[10, 20, 30, 71, 81]).stalls_ms(), [41.0]);
    }

    #[test]
    fn a_request_that_was_cancelled_meets_no_limit() {
        let mut record = request(1, &[10, 20]);
        assert!(record.met(&slo(10.0, 10.0)).both());
        record.outcome = Outcome::Cancelled;
        assert!(!record.met(&slo(10.0, 10.0)).ttft);
    }
}
