//! Service level objectives: the profile that judges a request, the judgement, and the budget that is left.
//!
//! A request is good when it ended well, its first token came within the profile's TTFT limit, and the 99th percentile of
//! its own gaps between tokens stayed within the profile's ITL limit. A request that was invalid counts neither as good nor as bad,
//! nor does one that its client cancelled, unless the client had waited longer for the first token than the limit.

mod config;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use serving_core::request::Lane;
use thiserror::Error;

pub use config::SloConfig;

/// The limits of one kind of traffic.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SloProfile {
    pub name: String,
    pub ttft_max: Duration,
    pub itl_max: Duration,
}

/// The limit that a request broke. The name is a metric label.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Breach {
    Ttft,
    Itl,
    /// The answer broke off in mid-stream.
    Incomplete,
    /// The request's own time limit, or that of the queue, had passed.
    HardTimeout,
    /// The request failed before its first token, through no fault of the client.
    ServerError,
}

impl Breach {
    pub const ALL: [Breach; 5] = [
        Breach::Ttft,
        Breach::Itl,
        Breach::Incomplete,
        Breach::HardTimeout,
        Breach::ServerError,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Breach::Ttft => "ttft",
            Breach::Itl => "itl",
            Breach::Incomplete => "incomplete",
            Breach::HardTimeout => "hard_timeout",
            Breach::ServerError => "5xx",
        }
    }
}

/// How a request ended, as far as the judgement needs it.
#[derive(Clone, Copy, Debug)]
pub struct Ended<'a> {
    /// The outcome label of `baton_requests_total`.
    pub outcome: &'a str,
    pub status: u16,
    pub ttft: Option<Duration>,
    pub itl_p99: Option<Duration>,
    pub e2e: Duration,
}

/// `None` when the request is not judged. Else the limits that it broke; none means good.
pub fn judge(profile: &SloProfile, ended: &Ended<'_>) -> Option<Vec<Breach>> {
    let had_tokens = ended.ttft.is_some();
    match ended.outcome {
        "ok" => {
            let late = ended.ttft.is_some_and(|ttft| ttft > profile.ttft_max);
            let jerky = ended.itl_p99.is_some_and(|itl| itl > profile.itl_max);
            let breaches = [(late, Breach::Ttft), (jerky, Breach::Itl)];
            Some(
                breaches
                    .into_iter()
                    .filter(|(is, _)| *is)
                    .map(|(_, breach)| breach)
                    .collect(),
            )
        }
        // Whoever gives up waiting for a slow cluster must not make it look well.
        "cancelled" if !had_tokens && ended.e2e > profile.ttft_max => Some(vec![Breach::Ttft]),
        "cancelled" | "invalid_request" | "too_large_for_pool" | "prompt_too_long" | "too_many_choices"
        | "ruled_out" | "slow_reader" => None,
        "deadline" | "queue_timeout" | "no_room" => Some(vec![Breach::HardTimeout]),
        _ if had_tokens => Some(vec![Breach::Incomplete]),
        _ if ended.status == 429 || ended.status >= 500 => Some(vec![Breach::ServerError]),
        _ => None,
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum SloRuleError {
    #[error("`{rule}` is not a rule: write model:NAME=PROFILE or lane:interactive=PROFILE")]
    Shape { rule: String },
    #[error("there is no SLO profile `{name}`; there are {known}")]
    UnknownProfile { name: String, known: String },
    #[error("there is no lane `{name}`; there are interactive and batch")]
    UnknownLane { name: String },
}

/// Decides which profile judges a request: that of its `x-slo` header, else of its model, else of its lane.
#[derive(Clone, Debug, Default)]
pub struct SloRules {
    config: SloConfig,
    by_model: BTreeMap<String, Arc<SloProfile>>,
    by_lane: BTreeMap<&'static str, Arc<SloProfile>>,
}

impl SloRules {
    /// # Errors
    /// [`SloRuleError`], for the first rule that cannot be read.
    pub fn parse(config: SloConfig, rules: &[String]) -> Result<Self, SloRuleError> {
        let mut all = Self {
            config,
            ..Self::default()
        };
        for rule in rules {
            let shape = || SloRuleError::Shape { rule: rule.clone() };
            let (whom, profile) = rule.split_once('=').ok_or_else(shape)?;
            let unknown = || SloRuleError::UnknownProfile {
                name: profile.to_owned(),
                known: all.config.names(),
            };
            let profile = all.config.by_name(profile).ok_or_else(unknown)?.clone();
            match whom.split_once(':') {
                Some(("model", name)) => {
                    all.by_model.insert(name.to_owned(), profile);
                }
                Some(("lane", name)) => {
                    let lane = Lane::ALL.into_iter().find(|lane| lane.name() == name);
                    let lane = lane.ok_or_else(|| SloRuleError::UnknownLane { name: name.to_owned() })?;
                    all.by_lane.insert(lane.name(), profile);
                }
                _ => return Err(shape()),
            }
        }
        Ok(all)
    }

    pub fn config(&self) -> &SloConfig {
        &self.config
    }

    pub fn choose(&self, asked: Option<&Arc<SloProfile>>, model: Option<&str>, lane: Lane) -> Arc<SloProfile> {
        let of_model = || model.and_then(|model| self.by_model.get(model));
        let of_lane = || self.by_lane.get(lane.name());
        let ruled = asked.or_else(of_model).or_else(of_lane);
        ruled.unwrap_or_else(|| self.config.of_lane(lane)).clone()
    }
}

/// Burn rates come from counts per slot of this length.
const SLOT: Duration = Duration::from_secs(30);
const SLOTS_PER_5_MIN: u64 = 10;
const SLOTS_PER_HOUR: u64 = 120;

#[derive(Clone, Copy, Debug, Default)]
struct Slot {
    total: u64,
    good: u64,
}

/// Counts of one profile in one lane since the process started.
#[derive(Clone, Debug, Default)]
pub struct SloCounts {
    pub total: u64,
    pub good: u64,
    pub breaches: BTreeMap<Breach, u64>,
    by_slot: BTreeMap<u64, Slot>,
}

impl SloCounts {
    fn add(&mut self, slot: u64, breaches: &[Breach]) {
        let is_good = breaches.is_empty();
        self.total += 1;
        self.good += u64::from(is_good);
        for breach in breaches {
            *self.breaches.entry(*breach).or_default() += 1;
        }
        let counts = self.by_slot.entry(slot).or_default();
        counts.total += 1;
        counts.good += u64::from(is_good);
        self.by_slot
            .retain(|kept, _| slot.saturating_sub(*kept) < SLOTS_PER_HOUR);
    }

    /// The share of bad requests over the share that is allowed. 1 spends the budget exactly.
    fn burn(&self, objective: f64, (now_slot, slots): (u64, u64)) -> Option<f64> {
        let recent = self
            .by_slot
            .iter()
            .filter(|(slot, _)| now_slot.saturating_sub(**slot) < slots);
        let (total, good) = recent.fold((0, 0), |(total, good), (_, slot)| {
            (total + slot.total, good + slot.good)
        });
        (total > 0).then(|| (total - good) as f64 / total as f64 / (1.0 - objective))
    }

    /// The part of the allowed bad requests that is left, for the requests so far. It is below zero when more were bad.
    pub fn budget_left(&self, objective: f64) -> Option<f64> {
        let allowed = self.total as f64 * (1.0 - objective);
        (self.total > 0).then(|| 1.0 - (self.total - self.good) as f64 / allowed)
    }
}

/// Burn rates of one profile in one lane; `None` without requests in the window.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Burn {
    pub over_5m: Option<f64>,
    pub over_1h: Option<f64>,
}

/// Every judged request, by profile and lane.
#[derive(Debug)]
pub struct SloLedger {
    started: Instant,
    counts: Mutex<BTreeMap<ProfileAndLane, SloCounts>>,
}

/// The names of a profile and of a lane.
pub type ProfileAndLane = (String, &'static str);

impl Default for SloLedger {
    fn default() -> Self {
        Self {
            started: Instant::now(),
            counts: Mutex::default(),
        }
    }
}

impl SloLedger {
    fn slot(&self, now: Instant) -> u64 {
        now.saturating_duration_since(self.started).as_secs() / SLOT.as_secs()
    }

    pub fn add(&self, (profile, lane): (&str, Lane), breaches: &[Breach], now: Instant) {
        let slot = self.slot(now);
        let key = (profile.to_owned(), lane.name());
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        counts.entry(key).or_default().add(slot, breaches);
    }

    /// Everything counted, by profile and lane. The burn rates are those against `objective`.
    pub fn report(&self, objective: f64, now: Instant) -> Vec<(ProfileAndLane, SloCounts, Burn)> {
        let slot = self.slot(now);
        let counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        let burn = |counts: &SloCounts| Burn {
            over_5m: counts.burn(objective, (slot, SLOTS_PER_5_MIN)),
            over_1h: counts.burn(objective, (slot, SLOTS_PER_HOUR)),
        };
        counts
            .iter()
            .map(|(key, counts)| (key.clone(), counts.clone(), burn(counts)))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ended(outcome: &str, ttft_ms: u64, itl_ms: u64) -> Ended<'_> {
        Ended {
            outcome,
            status: 200,
            ttft: Some(Duration::from_millis(ttft_ms)),
            itl_p99: Some(Duration::from_millis(itl_ms)),
            e2e: Duration::from_secs(30),
        }
    }

    fn built_in(name: &str) -> Arc<SloProfile> {
        SloConfig::default().by_name(name).expect("a built-in profile").clone()
    }

    #[test]
    fn each_breach_is_told_from_the_others_and_from_what_is_nobodys_fault() {
        let chat = built_in("chat");
        assert_eq!(judge(&chat, &ended("ok", 300, 50)), Some(vec![]));
        assert_eq!(
            judge(&chat, &ended("ok", 301, 51)),
            Some(vec![Breach::Ttft, Breach::Itl])
        );
        assert_eq!(
            judge(&chat, &ended("node_lost", 100, 10)),
            Some(vec![Breach::Incomplete])
        );
        assert_eq!(
            judge(&chat, &ended("deadline", 100, 10)),
            Some(vec![Breach::HardTimeout])
        );
        let early = Ended {
            status: 503,
            ttft: None,
            ..ended("not_ready", 0, 0)
        };
        assert_eq!(judge(&chat, &early), Some(vec![Breach::ServerError]));
        for outcome in ["cancelled", "invalid_request"] {
            assert_eq!(judge(&chat, &ended(outcome, 999, 999)), None, "{outcome}");
        }
        let gave_up = |after_ms| Ended {
            status: 499,
            ttft: None,
            e2e: Duration::from_millis(after_ms),
            ..ended("cancelled", 0, 0)
        };
        assert_eq!(judge(&chat, &gave_up(300)), None, "the first token was not late yet");
        assert_eq!(judge(&chat, &gave_up(301)), Some(vec![Breach::Ttft]));
    }

    #[test]
    fn the_header_wins_over_the_model_and_the_model_over_the_lane() {
        let rules = ["model:m=rag".to_owned(), "lane:batch=voice".to_owned()];
        let rules = SloRules::parse(SloConfig::default(), &rules).unwrap();
        let voice = built_in("voice");
        assert_eq!(rules.choose(Some(&voice), Some("m"), Lane::Batch).name, "voice");
        assert_eq!(rules.choose(None, Some("m"), Lane::Batch).name, "rag");
        assert_eq!(rules.choose(None, Some("other"), Lane::Batch).name, "voice");
        assert_eq!(rules.choose(None, Some("other"), Lane::Interactive).name, "chat");
        assert_eq!(SloRules::default().choose(None, None, Lane::Batch).name, "async-batch");
        for bad in ["chat", "model:m=none", "lane:night=chat", "x:y=chat"] {
            let parsed = SloRules::parse(SloConfig::default(), &[bad.to_owned()]);
            assert!(parsed.is_err(), "{bad}");
        }
    }

    #[test]
    fn the_budget_is_burnt_by_bad_requests_and_old_ones_leave_the_windows() {
        let ledger = SloLedger::default();
        let now = ledger.started;
        for i in 0..200 {
            let breaches: &[Breach] = if i < 2 { &[Breach::Ttft] } else { &[] };
            ledger.add(("chat", Lane::Interactive), breaches, now);
        }
        let (key, counts, burn) = ledger.report(0.995, now).remove(0);
        let expected = (("chat".to_owned(), "interactive"), 200, 198);
        assert_eq!((key, counts.total, counts.good), expected);
        // One in 200 may be bad. Two are twice the budget.
        assert!((burn.over_5m.unwrap() - 2.0).abs() < 1e-9);
        assert!((counts.budget_left(0.995).unwrap() + 1.0).abs() < 1e-9);
        // One in 100 may be bad: exactly the budget.
        assert!((ledger.report(0.99, now).remove(0).2.over_5m.unwrap() - 1.0).abs() < 1e-9);
        let (_, _, later) = ledger.report(0.995, now + Duration::from_secs(600)).remove(0);
        assert_eq!(later.over_5m, None);
        assert!(later.over_1h.is_some());
    }
}
