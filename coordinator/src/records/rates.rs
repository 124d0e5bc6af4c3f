//! The last hour in slots of half a minute: requests, output tokens, failures, times to the first token and gaps. The size is
//! fixed, so the coordinator always keeps it. `/admin/rates` shows it.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::Serialize;

use super::shape::{Summary, ms, now_unix_ms};
use super::sketch::Sketch;
use crate::slo::Breach;

/// The burn rates of the service levels have slots of the same length.
const SLOT_S: u64 = 30;
const SLOT: Duration = Duration::from_secs(SLOT_S);
/// One hour. A slot takes some 2 KB.
const SLOTS: usize = 120;
/// The limits that a request breaks when it fails through no fault of its client. A late token is no failure.
const FAILURES: [Breach; 3] = [Breach::Incomplete, Breach::HardTimeout, Breach::ServerError];

/// What happened in some time.
#[derive(Clone, Debug, Default)]
struct Counts {
    ended: u64,
    /// Those that ended well, or failed through no fault of their client.
    judged: u64,
    failed: u64,
    tokens: u64,
    ttft: Sketch,
    itl: Sketch,
}

impl Counts {
    fn add_all(&mut self, other: &Self) {
        self.ended += other.ended;
        self.judged += other.judged;
        self.failed += other.failed;
        self.tokens += other.tokens;
        self.ttft.add_all(&other.ttft);
        self.itl.add_all(&other.itl);
    }

    fn rates(&self, over: Duration) -> Rates {
        let seconds = over.as_secs_f64();
        let has_traffic = self.ended > 0 || self.tokens > 0;
        let per_second = |count: u64| (has_traffic && seconds > 0.0).then(|| rounded(count as f64 / seconds));
        Rates {
            seconds: rounded(seconds),
            requests: self.ended,
            requests_per_s: per_second(self.ended),
            output_tokens_per_s: per_second(self.tokens),
            error_share: (self.judged > 0).then(|| rounded(self.failed as f64 / self.judged as f64)),
            ttft_count: self.ttft.count(),
            ttft_p50_ms: self.ttft.quantile_ms(500),
            ttft_p99_ms: self.ttft.quantile_ms(990),
            itl_count: self.itl.count(),
            itl_p50_ms: self.itl.quantile_ms(500),
            itl_p99_ms: self.itl.quantile_ms(990),
        }
    }
}

/// Four decimals.
fn rounded(value: f64) -> f64 {
    (value * 1e4).round() / 1e4
}

/// The rates over some time. What no request gave a value for is `None`, never 0.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Rates {
    seconds: f64,
    /// That ended, however they did.
    requests: u64,
    requests_per_s: Option<f64>,
    output_tokens_per_s: Option<f64>,
    /// Failed requests, as a share of those that failed or ended well.
    error_share: Option<f64>,
    ttft_count: u64,
    ttft_p50_ms: Option<f64>,
    ttft_p99_ms: Option<f64>,
    itl_count: u64,
    itl_p50_ms: Option<f64>,
    itl_p99_ms: Option<f64>,
}

#[derive(Clone, Debug, Serialize)]
struct RateSlot {
    from_unix_ms: f64,
    #[serde(flatten)]
    rates: Rates,
}

/// The page `/admin/rates`.
#[derive(Clone, Debug, Serialize)]
pub struct RatesPage {
    now_unix_ms: f64,
    slot_s: u64,
    /// The oldest first. The last one is still open.
    slots: Vec<RateSlot>,
    /// All slots together.
    hour: Rates,
}

/// The slots by their numbers, which count from the start of the process. A slot in which nothing happened is not there.
#[derive(Debug)]
pub struct RateBook {
    started: Instant,
    slots: Mutex<BTreeMap<u64, Counts>>,
}

impl Default for RateBook {
    fn default() -> Self {
        Self {
            started: Instant::now(),
            slots: Mutex::default(),
        }
    }
}

impl RateBook {
    fn slots(&self) -> MutexGuard<'_, BTreeMap<u64, Counts>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn age(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.started)
    }

    fn count(&self, now: Instant, count: impl FnOnce(&mut Counts)) {
        let number = self.age(now).as_secs() / SLOT_S;
        let mut slots = self.slots();
        count(slots.entry(number).or_default());
        while slots.len() > SLOTS {
            slots.pop_first();
        }
    }

    /// A token was sent, this long after the token before it in the same choice.
    pub fn token(&self, now: Instant, since_last: Option<Duration>) {
        self.count(now, |counts| {
            counts.tokens += 1;
            if let Some(gap) = since_last {
                counts.itl.add(gap);
            }
        });
    }

    pub fn ended(&self, now: Instant, summary: &Summary) {
        let broken = |breach: &Breach| summary.breached.iter().any(|name| &**name == breach.name());
        let is_failed = FAILURES.iter().any(broken);
        let is_judged = is_failed || summary.outcome.as_deref() == Some("ok");
        let ttft = summary.ttft_ms.map(|ttft| Duration::try_from_secs_f64(ttft / 1e3));
        self.count(now, |counts| {
            counts.ended += 1;
            counts.judged += u64::from(is_judged);
            counts.failed += u64::from(is_failed);
            if let Some(Ok(ttft)) = ttft {
                counts.ttft.add(ttft);
            }
        });
    }

    pub fn page(&self, now: Instant) -> RatesPage {
        let age = self.age(now);
        let now_unix_ms = now_unix_ms();
        let last = age.as_secs() / SLOT_S;
        let first = (last + 1).saturating_sub(SLOTS as u64);
        let slots = self.slots();
        let (nothing, mut all, mut over) = (Counts::default(), Counts::default(), Duration::ZERO);
        let slot = |number: u64| {
            let since = age.saturating_sub(Duration::from_secs(number * SLOT_S));
            let counts = slots.get(&number).unwrap_or(&nothing);
            all.add_all(counts);
            over += since.min(SLOT);
            RateSlot {
                from_unix_ms: now_unix_ms - ms(since),
                rates: counts.rates(since.min(SLOT)),
            }
        };
        let shown = (first..=last).map(slot).collect();
        RatesPage {
            now_unix_ms,
            slot_s: SLOT_S,
            slots: shown,
            hour: all.rates(over),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ended(outcome: &'static str, ttft_ms: Option<f64>, breached: &[Breach]) -> Summary {
        Summary {
            outcome: Some(outcome.into()),
            ttft_ms,
            breached: breached.iter().map(|breach| breach.name().into()).collect(),
            ..Summary::default()
        }
    }

    #[test]
    fn a_slot_has_the_rates_of_its_time_and_what_nobody_asked_for_is_not_zero() {
        let book = RateBook::default();
        let at = |seconds| book.started + Duration::from_secs(seconds);
        // A late answer is an answer. What its client ended or got wrong is no failure.
        book.ended(at(1), &ended("ok", Some(200.0), &[Breach::Ttft]));
        book.ended(at(2), &ended("node_lost", None, &[Breach::ServerError]));
        book.ended(at(3), &ended("cancelled", None, &[]));
        for gap in [None, Some(Duration::from_millis(20)), Some(Duration::from_millis(20))] {
            book.token(at(29), gap);
        }
        book.token(at(60), None);
        let page = book.page(at(70));
        let seconds: Vec<f64> = page.slots.iter().map(|slot| slot.rates.seconds).collect();
        assert_eq!(seconds, [30.0, 30.0, 10.0]);
        let [first, idle, open] = [0, 1, 2].map(|slot| page.slots[slot].rates.clone());
        assert_eq!((first.requests, first.requests_per_s), (3, Some(0.1)));
        assert_eq!((first.output_tokens_per_s, first.error_share), (Some(0.1), Some(0.5)));
        assert_eq!((first.ttft_count, first.itl_count), (1, 2));
        assert!(first.ttft_p99_ms.is_some_and(|ms| (186.0..214.0).contains(&ms)));
        assert!(first.itl_p50_ms.is_some_and(|ms| (18.6..21.4).contains(&ms)));
        let idle = serde_json::to_value(idle).expect("JSON");
        for name in [
            "requests_per_s",
            "output_tokens_per_s",
            "error_share",
            "ttft_p50_ms",
            "itl_p99_ms",
        ] {
            assert!(idle.get(name).is_some_and(serde_json::Value::is_null), "{name}: {idle}");
        }
        // An answer runs, and none has ended.
        assert_eq!((open.requests_per_s, open.error_share), (Some(0.0), None));
        assert_eq!(
            (page.hour.seconds, page.hour.requests, page.hour.itl_count),
            (70.0, 3, 2)
        );
        let from: Vec<f64> = page
            .slots
            .iter()
            .map(|slot| page.now_unix_ms - slot.from_unix_ms)
            .collect();
        assert!(from[0] - from[1] > 29_999.0 && from[2] < 10_001.0, "{from:?}");
    }

    #[test]
    fn an_hour_is_kept_and_no_more() {
        let book = RateBook::default();
        let at = |seconds| book.started + Duration::from_secs(seconds);
        for slot in 0..500 {
            book.token(at(slot * SLOT_S), None);
        }
        assert_eq!(book.slots().len(), SLOTS);
        let page = book.page(at(499 * SLOT_S + 1));
        assert_eq!((page.slots.len(), page.hour.requests_per_s), (SLOTS, Some(0.0)));
        let page = book.page(at(3 * 3600 + 500 * SLOT_S));
        assert_eq!((page.slots.len(), page.hour.output_tokens_per_s), (SLOTS, None));
    }
}
