//! Fingerprints of prompts for a recording of traffic (`baton record`): which blocks prompts share, and which prompt goes on
//! where another one ended. They are made only while somebody asks for them.
//!
//! Each state is SHA-256 over a secret salt, the state before it and the tokens of one block, so equal states mean equal
//! prompts up to there. The salt is drawn when a recording begins and never leaves the process: without it nobody can find a
//! prompt by hashing candidates, and two recordings share no fingerprint.

use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use serving_core::ids::TokenId;
use sha2::{Digest, Sha256};

/// Tokens of one fingerprint. A recording has this size whatever block size the nodes have.
pub const BLOCK_TOKENS: usize = 16;
/// Fingerprints are made for so long after somebody has asked for them.
const WANTED_FOR: Duration = Duration::from_secs(60);
/// Blocks of one prompt that are kept: 131,072 tokens. The rest of a longer prompt has no fingerprint.
const BLOCKS_MAX: usize = 8_192;
/// Prompts whose ends are remembered, to find the prompts that go on from there.
const ENDS_MAX: usize = 4_096;

/// One prompt of a request.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PrefixShape {
    pub prompt_tokens: u32,
    /// One for each block of 16 tokens; the last may stand for fewer. Equal numbers: the prompts are equal up to there.
    pub blocks: Vec<u64>,
    /// The record whose whole prompt this one begins with, if it is longer.
    pub continues: Option<u64>,
}

impl PrefixShape {
    pub fn bytes(&self) -> usize {
        size_of::<Self>() + size_of_val(self.blocks.as_slice())
    }
}

/// The state after a block: the first half of a SHA-256.
type State = [u8; 16];

/// Where a prompt ended: its last state, and the number of its last tokens that fill no block.
#[derive(Clone, Copy, Debug)]
struct End {
    seq: u64,
    /// Of the whole blocks.
    state: State,
    rest_tokens: usize,
    /// Of all tokens.
    end: State,
}

/// Fingerprints of one recording.
#[derive(Debug)]
struct Book {
    salt: [u8; 32],
    wanted_until: Instant,
    ends: HashMap<State, Vec<End>>,
    order: VecDeque<(State, u64)>,
}

/// Shared by all requests. Off until somebody asks.
#[derive(Debug, Default)]
pub struct PrefixBook {
    book: Mutex<Option<Book>>,
}

impl PrefixBook {
    fn book(&self) -> MutexGuard<'_, Option<Book>> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Somebody asks for fingerprints. `salt` is taken when a recording begins, that is when nobody has asked for a minute.
    /// Returns a name of the recording: fingerprints of two names cannot be compared.
    pub fn asked(&self, now: Instant, salt: [u8; 32]) -> String {
        let mut book = self.book();
        if book.as_ref().is_none_or(|book| book.wanted_until < now) {
            *book = Some(Book {
                salt,
                wanted_until: now,
                ends: HashMap::new(),
                order: VecDeque::new(),
            });
        }
        let mut name = String::new();
        if let Some(book) = book.as_mut() {
            book.wanted_until = now + WANTED_FOR;
            let digest = Sha256::new().chain_update(b"name").chain_update(book.salt).finalize();
            name = digest.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
        }
        name
    }

    /// The salt while fingerprints are wanted. When they no longer are, what was remembered goes.
    fn salt(&self, now: Instant) -> Option<[u8; 32]> {
        let mut book = self.book();
        if book.as_ref().is_some_and(|book| book.wanted_until < now) {
            *book = None;
        }
        book.as_ref().map(|book| book.salt)
    }

    /// The fingerprints of the prompt of record `seq`; `None` while nobody wants them. A block takes 0.2 us where the CPU has
    /// instructions for SHA-256.
    pub(crate) fn fingerprint(&self, seq: u64, tokens: &[TokenId], now: Instant) -> Option<PrefixShape> {
        let salt = self.salt(now)?;
        let kept = &tokens[..tokens.len().min(BLOCKS_MAX * BLOCK_TOKENS)];
        let mut states: Vec<State> = Vec::with_capacity(kept.len() / BLOCK_TOKENS + 2);
        states.push(State::default());
        for block in kept.chunks(BLOCK_TOKENS) {
            let before = states[states.len() - 1];
            states.push(next(&salt, before, block));
        }
        let whole = kept.len() / BLOCK_TOKENS;
        let continues = self.go_on(&salt, kept, &states[..=whole]);
        if kept.len() == tokens.len() {
            self.remember(End {
                seq,
                state: states[whole],
                rest_tokens: tokens.len() % BLOCK_TOKENS,
                end: states[states.len() - 1],
            });
        }
        Some(PrefixShape {
            prompt_tokens: u32::try_from(tokens.len()).unwrap_or(u32::MAX),
            blocks: states[1..].iter().map(number).collect(),
            continues,
        })
    }

    /// The longest prompt that these tokens begin with, and the newest of equal ones. It is taken out: a conversation goes on
    /// once.
    fn go_on(&self, salt: &[u8; 32], tokens: &[TokenId], states: &[State]) -> Option<u64> {
        let mut book = self.book();
        // A recording that began in between knows no prompt with this salt.
        let ends = &mut book.as_mut().filter(|book| book.salt == *salt)?.ends;
        for (block, state) in states.iter().enumerate().rev() {
            let rest = &tokens[block * BLOCK_TOKENS..];
            let Some(here) = ends.get_mut(state) else { continue };
            let is_begin = |end: &End| {
                let mine = rest.get(..end.rest_tokens).filter(|mine| mine.len() < rest.len());
                mine.is_some_and(|mine| mine.is_empty() || next(salt, *state, mine) == end.end)
            };
            let longest = (0..here.len()).filter(|at| is_begin(&here[*at]));
            if let Some(at) = longest.max_by_key(|at| (here[*at].rest_tokens, here[*at].seq)) {
                let seq = here.swap_remove(at).seq;
                if here.is_empty() {
                    ends.remove(state);
                }
                return Some(seq);
            }
        }
        None
    }

    fn remember(&self, end: End) {
        let mut book = self.book();
        let Some(book) = book.as_mut() else { return };
        book.ends.entry(end.state).or_default().push(end);
        book.order.push_back((end.state, end.seq));
        while book.order.len() > ENDS_MAX {
            let Some((state, seq)) = book.order.pop_front() else {
                break;
            };
            let Some(here) = book.ends.get_mut(&state) else {
                continue;
            };
            here.retain(|end| end.seq != seq);
            if here.is_empty() {
                book.ends.remove(&state);
            }
        }
    }
}

fn next(salt: &[u8; 32], before: State, tokens: &[TokenId]) -> State {
    let mut hash = Sha256::new().chain_update(salt).chain_update(before);
    for token in tokens {
        hash.update(token.0.to_le_bytes());
    }
    let digest = hash.finalize();
    let mut state = State::default();
    state.copy_from_slice(&digest[..16]);
    state
}

fn number(state: &State) -> u64 {
    let (first, _) = state.split_at(8);
    first.iter().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SALT: [u8; 32] = [7; 32];

    fn tokens(ids: impl IntoIterator<Item = u32>) -> Vec<TokenId> {
        ids.into_iter().map(TokenId).collect()
    }

    fn wanted(now: Instant) -> PrefixBook {
        let book = PrefixBook::default();
        book.asked(now, SALT);
        book
    }

    #[test]
    fn nothing_is_made_until_somebody_asks_and_a_minute_after_the_last_one() {
        let now = Instant::now();
        let book = PrefixBook::default();
        assert_eq!(book.fingerprint(1, &tokens(0..40), now), None);
        book.asked(now, SALT);
        assert!(
            book.fingerprint(2, &tokens(0..40), now + Duration::from_secs(59))
                .is_some()
        );
        assert_eq!(book.fingerprint(3, &tokens(0..40), now + Duration::from_secs(61)), None);
    }

    #[test]
    fn prompts_share_their_blocks_up_to_the_first_difference() {
        let now = Instant::now();
        let book = wanted(now);
        let blocks = |seq, tokens: Vec<TokenId>| book.fingerprint(seq, &tokens, now).expect("wanted").blocks;
        let first = blocks(1, tokens(0..40));
        let other = blocks(2, tokens((0..32).chain([99, 98])));
        let again = blocks(3, tokens(0..40));
        assert_eq!((first.len(), other.len()), (3, 3));
        assert_eq!(first[..2], other[..2]);
        assert_ne!(first[2], other[2]);
        assert_eq!(first, again, "the same prompt");
        // The same tokens at another place are another prefix.
        assert_ne!(blocks(4, tokens(16..32))[0], first[1]);
    }

    #[test]
    fn a_recording_has_its_own_salt_and_name_while_somebody_asks() {
        let now = Instant::now();
        let book = PrefixBook::default();
        let name = book.asked(now, SALT);
        let first = book.fingerprint(1, &tokens(0..16), now).expect("wanted").blocks;
        assert_eq!(book.asked(now + Duration::from_secs(30), [8; 32]), name);
        let later = now + Duration::from_secs(200);
        assert_ne!(book.asked(later, [8; 32]), name);
        assert_ne!(
            book.fingerprint(2, &tokens(0..16), later).expect("wanted").blocks,
            first
        );
        // The salt is not in the name.
        assert!(!name.contains("0707"));
    }

    #[test]
    fn a_prompt_goes_on_where_the_longest_and_newest_one_ended_once() {
        let now = Instant::now();
        let book = wanted(now);
        let continues = |seq, tokens: Vec<TokenId>| book.fingerprint(seq, &tokens, now).expect("wanted").continues;
        assert_eq!(continues(1, tokens(0..20)), None);
        assert_eq!(continues(2, tokens(0..20)), None, "an equal prompt is no next turn");
        assert_eq!(continues(3, tokens((0..20).chain([50; 30]))), Some(2));
        assert_eq!(continues(4, tokens((0..20).chain([51; 30]))), Some(1));
        assert_eq!(continues(5, tokens((0..20).chain([52; 30]))), None, "both have gone on");
        assert_eq!(continues(6, tokens((0..20).chain([50; 31]))), Some(3), "the longest");
        // The rest of the last block counts, token for token.
        assert_eq!(continues(7, tokens(100..120)), None);
        assert_eq!(continues(8, tokens((100..119).chain([7; 9]))), None);
        // A prompt of whole blocks ends at a block.
        assert_eq!(continues(9, tokens(200..232)), None);
        assert_eq!(continues(10, tokens(200..233)), Some(9));
        // One that is shorter than a block.
        assert_eq!(continues(11, tokens(300..303)), None);
        assert_eq!(continues(12, tokens(300..304)), Some(11));
    }

    #[test]
    fn memory_is_limited() {
        let now = Instant::now();
        let book = wanted(now);
        for seq in 0..(ENDS_MAX as u64 + 10) {
            book.fingerprint(seq, &tokens([seq as u32, 1, 2]), now);
        }
        let counted = |book: &PrefixBook| {
            let book = book.book();
            let book = book.as_ref().expect("on");
            (book.order.len(), book.ends.values().map(Vec::len).sum::<usize>())
        };
        assert_eq!(counted(&book), (ENDS_MAX, ENDS_MAX));
        let long = book.fingerprint(9_999, &vec![TokenId(1); BLOCK_TOKENS * (BLOCKS_MAX + 5)], now);
        assert_eq!(long.map(|shape| shape.blocks.len()), Some(BLOCKS_MAX));
    }
}
