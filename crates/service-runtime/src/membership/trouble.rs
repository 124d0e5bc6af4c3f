//! What a link says while it has no stream, and how long it waits before it dials again. Pure: time is an argument.

use std::time::Duration;

use proto::messages::RegisterRefusedReason;
use tokio::time::Instant;

use super::LostReason;

/// A coordinator may start a moment after its nodes.
const FIRST_WORD_AFTER: Duration = Duration::from_secs(2);
const WORD_EVERY: Duration = Duration::from_secs(30);
const PAUSE_FIRST: Duration = Duration::from_millis(50);
/// The longest pause. A restarted coordinator has its nodes again within this time.
const PAUSE_MAX: Duration = Duration::from_secs(1);
/// For a refusal that lasts until a person changes a setting.
const PAUSE_REFUSED_MAX: Duration = Duration::from_secs(10);

/// The tries since the link's last stream.
#[derive(Debug)]
pub(super) struct Trouble {
    since: Instant,
    tries: u32,
    said_at: Option<Instant>,
    refusal: Option<String>,
    pause: Duration,
}

/// What is to be logged of a try that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Word {
    /// It has been said, or it is too early.
    Nothing,
    NoCoordinator {
        waited: Duration,
        tries: u32,
    },
    /// It is said once, and again when the refusal is another one.
    Refused,
}

impl Trouble {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            since: now,
            tries: 0,
            said_at: None,
            refusal: None,
            pause: PAUSE_FIRST,
        }
    }

    /// A try without a welcome.
    pub(super) fn failed(&mut self, now: Instant, reason: &LostReason) -> Word {
        self.tries += 1;
        if is_refusal(reason) {
            let words = reason.to_string();
            let is_new = self.refusal.as_ref() != Some(&words);
            self.refusal = Some(words);
            return if is_new { Word::Refused } else { Word::Nothing };
        }
        let is_due = match self.said_at {
            None => now >= self.since + FIRST_WORD_AFTER,
            Some(said_at) => now >= said_at + WORD_EVERY,
        };
        if !is_due {
            return Word::Nothing;
        }
        self.said_at = Some(now);
        Word::NoCoordinator {
            waited: now - self.since,
            tries: self.tries,
        }
    }

    /// How long to wait before the next try. A namesake's lease ends soon, so that refusal is tried again as quickly as a
    /// coordinator that does not answer.
    pub(super) fn pause(&mut self, reason: &LostReason) -> Duration {
        let most = match reason {
            LostReason::Refused {
                reason: RegisterRefusedReason::NameTaken,
                ..
            } => PAUSE_MAX,
            reason if is_refusal(reason) => PAUSE_REFUSED_MAX,
            _ => PAUSE_MAX,
        };
        let pause = self.pause.min(most);
        self.pause = (pause * 2).min(most);
        pause
    }
}

fn is_refusal(reason: &LostReason) -> bool {
    matches!(
        reason,
        LostReason::Refused { .. }
            | LostReason::NotUnderstood(_)
            | LostReason::AnotherName(_)
            | LostReason::Contract(_)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(reason: RegisterRefusedReason) -> LostReason {
        LostReason::Refused {
            reason,
            detail: "d".to_owned(),
        }
    }

    #[test]
    fn a_missing_coordinator_is_told_after_two_seconds_and_then_every_thirty() {
        let start = Instant::now();
        let mut trouble = Trouble::new(start);
        let reason = LostReason::Connect("nobody listens".to_owned());
        let told: Vec<u64> = (1..=70)
            .filter(|second| trouble.failed(start + Duration::from_secs(*second), &reason) != Word::Nothing)
            .collect();
        assert_eq!(told, [2, 32, 62]);
        let last = trouble.failed(start + Duration::from_secs(100), &reason);
        let waited = Duration::from_secs(100);
        assert_eq!(last, Word::NoCoordinator { waited, tries: 71 });
    }

    #[test]
    fn a_refusal_is_told_once_and_again_when_it_changes() {
        let now = Instant::now();
        let mut trouble = Trouble::new(now);
        let (model, name) = (
            refused(RegisterRefusedReason::IncompatibleModel),
            refused(RegisterRefusedReason::NameTaken),
        );
        let words = [&model, &model, &name, &model].map(|reason| trouble.failed(now, reason));
        assert_eq!(words, [Word::Refused, Word::Nothing, Word::Refused, Word::Refused]);
    }

    #[test]
    fn pauses_double_up_to_a_second_and_further_for_a_lasting_refusal() {
        let longest = |reason: LostReason| {
            let mut trouble = Trouble::new(Instant::now());
            let pauses: Vec<Duration> = (0..12).map(|_| trouble.pause(&reason)).collect();
            assert_eq!(pauses[..2], [PAUSE_FIRST, PAUSE_FIRST * 2]);
            pauses[11]
        };
        assert_eq!(longest(LostReason::Ended), PAUSE_MAX);
        assert_eq!(longest(refused(RegisterRefusedReason::NameTaken)), PAUSE_MAX);
        assert_eq!(longest(refused(RegisterRefusedReason::Invalid)), PAUSE_REFUSED_MAX);
    }
}
