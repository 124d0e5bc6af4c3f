//! Content for the requests of a trace, which has none: token ids or words, drawn from a seed so that prompts that share prefix
//! blocks in the trace share exactly these parts.
//!
//! A turn of a conversation has drawn content where its earlier answers would stand: a prefix cache finds the earlier prompts, and not
//! their answers.

pub mod datasets;

use std::ops::Range;

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::trace::Trace;

/// Prompts as token ids, whose number is exact.
#[derive(Clone, Debug)]
pub struct TokenPrompts {
    tokens: Vec<u32>,
    seed: u64,
}

#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{found} token ids are left to make prompts of, and at least {MIN_TOKENS} are needed: give a wider range")]
pub struct TooFewTokens {
    pub found: usize,
}

/// With fewer, blocks that the trace says are different would often be equal.
const MIN_TOKENS: usize = 64;
/// The size of the largest vocabularies, with much room.
const VOCABULARY_MAX: u32 = 1 << 21;

impl TokenPrompts {
    /// Ids are drawn from `range` without `excluded` (special tokens, such as the one that ends an answer).
    pub fn new(range: Range<u32>, excluded: &[u32], seed: u64) -> Result<Self, TooFewTokens> {
        let range = range.start..range.end.min(VOCABULARY_MAX);
        let tokens: Vec<u32> = range.filter(|token| !excluded.contains(token)).collect();
        match tokens.len() {
            found @ ..MIN_TOKENS => Err(TooFewTokens { found }),
            _ => Ok(Self { tokens, seed }),
        }
    }

    /// The prompt of request `index`, as long as the trace says. Empty where the trace has no such request.
    pub fn token_ids(&self, trace: &Trace, index: usize) -> Vec<u32> {
        let mut ids = Vec::new();
        for mut part in parts(trace, index, self.seed) {
            let drawn = (part.from..part.to).map(|_| self.tokens[part.random.random_range(0..self.tokens.len())]);
            ids.extend(drawn);
        }
        ids
    }
}

/// Prompts as text, for servers that take text only: short English words, each of them one token in the vocabularies of the common
/// models. Where the server can count tokens, measure `words_per_token` on one long prompt and give it.
#[derive(Clone, Copy, Debug)]
pub struct WordPrompts {
    pub words_per_token: f64,
    pub seed: u64,
}

impl WordPrompts {
    /// The prompt of request `index`. Blocks begin at the same word in all prompts, so equal blocks are equal words.
    pub fn text(&self, trace: &Trace, index: usize) -> String {
        let words: Vec<&str> = WORDS.split_ascii_whitespace().collect();
        let mut text = String::new();
        for mut part in parts(trace, index, self.seed) {
            for _ in self.word_count(part.from)..self.word_count(part.to) {
                if !text.is_empty() {
                    text.push(' ');
                }
                text.push_str(words[part.random.random_range(0..words.len())]);
            }
        }
        text
    }

    fn word_count(&self, tokens: u32) -> u64 {
        // `as` saturates, and a factor that is no number gives 0.
        (f64::from(tokens) * self.words_per_token.min(16.0)).round() as u64
    }
}

/// Tokens `from..to` of a prompt, and the random numbers that make them.
struct Part {
    from: u32,
    to: u32,
    random: ChaCha8Rng,
}

/// The blocks with an id, then the rest, which belongs to this request alone.
fn parts(trace: &Trace, index: usize, seed: u64) -> impl Iterator<Item = Part> {
    let request = trace.requests.get(index);
    let prompt_tokens = request.map_or(0, |request| request.prompt_tokens);
    let ids = request.map_or(&[][..], |request| &request.prefix_blocks);
    let block_tokens = trace.block_tokens;
    let begin = move |block: u32| block.saturating_mul(block_tokens).min(prompt_tokens);
    let blocks = (0..).zip(ids).map(move |(block, id)| Part {
        from: begin(block),
        to: begin(block + 1),
        random: random(seed, *id, Kind::Block),
    });
    let shared = u32::try_from(ids.len()).unwrap_or(u32::MAX);
    let rest = Part {
        from: begin(shared),
        to: prompt_tokens,
        random: random(seed, u64::try_from(index).unwrap_or(u64::MAX), Kind::Rest),
    };
    blocks.chain(std::iter::once(rest))
}

#[derive(Clone, Copy)]
enum Kind {
    Block = 1,
    Rest = 2,
}

fn random(seed: u64, number: u64, kind: Kind) -> ChaCha8Rng {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    bytes[8..16].copy_from_slice(&number.to_le_bytes());
    bytes[16] = kind as u8;
    ChaCha8Rng::from_seed(bytes)
}

const WORDS: &str = "\
    about after again against air all also an and another any are around as at back be because been before between \
    board body book both but by came can car child church city come could day did do door down during each early \
    east even face fact father field first five food for force form four from game go good great group had hand \
    has have he heart her him his home house how if in into is it its just king know land last level life light \
    like line little long made make man many may me men might money month more morning most mother mr much music \
    must my name never new night no north not now number of off old on one only or order other our out over paper \
    part people place plan point power price right river road room said same school second see she should side \
    since six small so some sound south space state still story street study such table take than that the their \
    them then there these they this those three through time to too town trade two under up use used very was \
    water way we week well were west what when where which while white who will with without work world would year \
    years you young your
    ";

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::time::Duration;

    use proptest::prelude::*;
    use serving_core::request::Lane;

    use super::*;
    use crate::trace::TraceRequest;

    fn trace(requests: &[(u32, &[u64])]) -> Trace {
        let request = |(prompt_tokens, blocks): &(u32, &[u64])| TraceRequest {
            at: Duration::ZERO,
            prompt_tokens: *prompt_tokens,
            output_tokens: 1,
            prefix_blocks: blocks.to_vec(),
            lane: Lane::Interactive,
            conversation: None,
        };
        Trace {
            name: String::new(),
            block_tokens: 16,
            requests: requests.iter().map(request).collect(),
        }
    }

    fn shared<T: PartialEq>(one: &[T], other: &[T]) -> usize {
        one.iter().zip(other).take_while(|(one, other)| one == other).count()
    }

    #[test]
    fn equal_blocks_have_equal_tokens_and_words() {
        let trace = trace(&[(50, &[7, 8]), (40, &[7, 8, 9]), (33, &[7, 5, 6]), (40, &[7, 8, 9])]);
        let prompts = TokenPrompts::new(100..30_000, &[200], 3).expect("the range is wide");
        let ids: Vec<_> = (0..4).map(|index| prompts.token_ids(&trace, index)).collect();
        let lengths: Vec<_> = ids.iter().map(Vec::len).collect();
        assert_eq!(lengths, [50, 40, 33, 40]);
        assert_eq!(
            (
                shared(&ids[0], &ids[1]),
                shared(&ids[0], &ids[2]),
                shared(&ids[1], &ids[3])
            ),
            (32, 16, 40)
        );
        let words = WordPrompts {
            words_per_token: 0.75,
            seed: 3,
        };
        let text: Vec<_> = (0..3).map(|index| words.text(&trace, index)).collect();
        let split: Vec<Vec<_>> = text.iter().map(|text| text.split(' ').collect()).collect();
        assert_eq!((split[0].len(), split[1].len(), split[2].len()), (38, 30, 25));
        assert_eq!((shared(&split[0], &split[1]), shared(&split[0], &split[2])), (24, 12));
        assert!(prompts.token_ids(&trace, 4).is_empty());
    }

    /// Reports cite seeds: another version of a library must not change what a seed means.
    #[test]
    fn a_seed_keeps_its_tokens() {
        let prompts = TokenPrompts::new(0..50_000, &[], 42).expect("the range is wide");
        assert_eq!(
            prompts.token_ids(&trace(&[(4, &[9])]), 0),
            [2_616, 32_588, 9_845, 19_908]
        );
        let words = WordPrompts {
            words_per_token: 1.0,
            seed: 42,
        };
        assert_eq!(words.text(&trace(&[(4, &[9])]), 0), "are road early life");
    }

    #[test]
    fn the_words_are_many_and_different() {
        let words: Vec<&str> = WORDS.split_ascii_whitespace().collect();
        assert!(words.len() > 200);
        assert_eq!(words.iter().collect::<BTreeSet<_>>().len(), words.len());
    }

    #[test]
    fn a_range_that_is_too_narrow_is_refused() {
        assert_eq!(
            TokenPrompts::new(5..60, &[7], 0).err(),
            Some(TooFewTokens { found: 54 })
        );
        let reversed = std::ops::Range { start: 9, end: 5 };
        assert_eq!(
            TokenPrompts::new(reversed, &[], 0).err(),
            Some(TooFewTokens { found: 0 })
        );
    }

    proptest! {
        /// Whatever the trace says, prompts have its lengths, and only allowed ids.
        #[test]
        fn prompts_have_the_lengths_of_the_trace(tokens in 0_u32..3_000, blocks in 0_u64..300, seed in any::<u64>()) {
            let ids: Vec<u64> = (0..blocks).collect();
            let trace = trace(&[(tokens, &ids)]);
            let prompts = TokenPrompts::new(10..500, &[11, 499], seed).expect("the range is wide");
            let prompt = prompts.token_ids(&trace, 0);
            prop_assert_eq!(prompt.len(), tokens as usize);
            prop_assert!(prompt.iter().all(|id| (10..499).contains(id) && *id != 11));
            let words = WordPrompts { words_per_token: 1.0, seed }.text(&trace, 0);
            prop_assert_eq!(words.split_ascii_whitespace().count(), tokens as usize);
        }
    }
}
