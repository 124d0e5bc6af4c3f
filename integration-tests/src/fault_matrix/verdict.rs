//! What a client may see under a fault, and what it must never see.

use super::cells::{Cell, FaultKind, Victim};
use super::client::{Ending, Seen, Terminal};
use crate::token_exact::Answer;

/// What one request came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Outcome {
    /// The baseline's tokens, to the last.
    Completed,
    /// An explicit error, in the stream or instead of it.
    Failed,
    /// The coordinator died and the connection with it.
    ConnectionLost,
    /// This client left.
    Left,
}

/// Whether a connection may end before its answer does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Connection {
    Holds,
    /// The process at its other end dies.
    MayBreak,
}

impl From<Cell> for Connection {
    fn from(cell: Cell) -> Self {
        match (cell.victim, cell.fault) {
            (Victim::Coordinator, FaultKind::Kill) => Connection::MayBreak,
            _ => Connection::Holds,
        }
    }
}

/// Judges one request against its fault-free tokens and the KV they came from. An answer whose node died after the last
/// token has no hashes.
///
/// # Errors
/// In words, what no fault excuses.
pub fn judge(connection: Connection, seen: &Seen, answer: &Answer) -> Result<Outcome, String> {
    let baseline = &answer.tokens;
    let told = seen.tokens.len();
    let differs = seen.tokens.iter().zip(baseline).position(|(a, b)| a != b);
    if let Some(at) = differs {
        return Err(format!(
            "WRONG TEXT: token {at} is {}, without the fault {}",
            seen.tokens[at], baseline[at]
        ));
    }
    if told > baseline.len() {
        return Err(format!("{told} tokens, {} were asked for", baseline.len()));
    }
    if seen.late_events > 0 {
        return Err(format!("{} events after the end", seen.late_events));
    }
    if !seen.kv_hashes.is_empty() && seen.kv_hashes != answer.kv_hashes {
        return Err(format!(
            "WRONG KV: {:?}, without the fault {:?}",
            seen.kv_hashes, answer.kv_hashes
        ));
    }
    match (seen.ending.as_ref(), seen.terminals.as_slice()) {
        (Some(Ending::Whole), [Terminal::Finished(_)]) if told < baseline.len() => {
            Err(format!("finished after {told} of {} tokens", baseline.len()))
        }
        (Some(Ending::Whole), [Terminal::Finished(_)]) if seen.is_done_seen => Ok(Outcome::Completed),
        (Some(Ending::Whole), [Terminal::Error(_)]) if seen.is_done_seen => Ok(Outcome::Failed),
        (Some(Ending::Status(status)), [Terminal::Error(_)]) if *status >= 400 => Ok(Outcome::Failed),
        // A coordinator that is killed may have written the last token and not yet [DONE].
        (Some(Ending::Broken(_)), [] | [Terminal::Finished(_)]) if connection == Connection::MayBreak => {
            Ok(Outcome::ConnectionLost)
        }
        (Some(Ending::Left), _) => Ok(Outcome::Left),
        (Some(Ending::Stuck), _) => Err(format!("no end within the limit, after {told} tokens")),
        (ending, terminals) => Err(format!(
            "ended as {ending:?} with {terminals:?}, [DONE] {}",
            if seen.is_done_seen { "seen" } else { "missing" }
        )),
    }
}

#[cfg(test)]
mod tests {
    use service_runtime::failpoints::FaultPoint;

    use super::*;

    const KILL_D: Cell = Cell {
        victim: Victim::Decode,
        fault: FaultKind::Kill,
        point: FaultPoint::MidDecode,
    };

    fn whole(tokens: &[u32], terminals: &[Terminal]) -> Seen {
        Seen {
            tokens: tokens.to_vec(),
            terminals: terminals.to_vec(),
            is_done_seen: true,
            ending: Some(Ending::Whole),
            ..Seen::default()
        }
    }

    fn answer() -> Answer {
        Answer {
            tokens: vec![1, 2],
            kv_hashes: vec!["a".into(), "b".into()],
        }
    }

    #[test]
    fn the_baselines_tokens_or_an_explicit_error_pass() {
        let length = Terminal::Finished("length".to_owned());
        let error = Terminal::Error("node_lost".to_owned());
        let with_hashes = |hashes: &[&str]| Seen {
            kv_hashes: hashes.iter().map(|&hash| hash.to_owned()).collect(),
            ..whole(&[1, 2], std::slice::from_ref(&length))
        };
        let judged = |seen: &Seen| judge(Connection::Holds, seen, &answer());
        assert_eq!(judged(&with_hashes(&["a", "b"])), Ok(Outcome::Completed));
        assert_eq!(judged(&with_hashes(&[])), Ok(Outcome::Completed));
        assert_eq!(judged(&whole(&[1], std::slice::from_ref(&error))), Ok(Outcome::Failed));
        for (what, seen) in [
            ("another token", whole(&[1, 3], std::slice::from_ref(&length))),
            (
                "another token before an error",
                whole(&[3], std::slice::from_ref(&error)),
            ),
            ("a gap", whole(&[2], std::slice::from_ref(&error))),
            ("too few", whole(&[1], std::slice::from_ref(&length))),
            ("other KV", with_hashes(&["a", "c"])),
            ("KV of more than the prompt", with_hashes(&["a", "b", "c"])),
            ("no end", whole(&[1, 2], &[])),
            ("two ends", whole(&[1, 2], &[length.clone(), error.clone()])),
        ] {
            assert!(judged(&seen).is_err(), "{what}");
        }
    }

    #[test]
    fn a_broken_connection_is_only_the_dead_coordinators() {
        let broken = Seen {
            tokens: vec![1],
            ending: Some(Ending::Broken("reset".to_owned())),
            ..Seen::default()
        };
        assert!(judge(KILL_D.into(), &broken, &answer()).is_err());
        let kill_c = Cell {
            victim: Victim::Coordinator,
            ..KILL_D
        };
        assert_eq!(judge(kill_c.into(), &broken, &answer()), Ok(Outcome::ConnectionLost));
    }
}
