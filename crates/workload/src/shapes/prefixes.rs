//! Requests whose prompts begin with one of a few prefixes: system prompts, tools, documents.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha12Rng;

use super::{BLOCK_OF_PREFIX, BLOCKS_MAX, Length, OWNERS_MAX, ShapeError, block_id, check_requests, request};
use crate::trace::Trace;

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SharedPrefixes {
    /// Each request takes one of them, all equally often.
    pub prefixes: u32,
    /// Cut to whole blocks of `block_tokens`.
    pub prefix_tokens: u32,
    pub block_tokens: u32,
    /// What follows the prefix, of each request alone.
    pub rest: Length,
    pub output: Length,
}

impl SharedPrefixes {
    /// The measured requests. With an empty cache they are the cold half of a pair; after `warm_up` they are the warm one.
    pub fn trace(&self, requests: usize, seed: u64) -> Result<Trace, ShapeError> {
        let blocks = self.blocks()?;
        check_requests(requests as u64)?;
        let (rest, output) = (
            self.rest.range("the rest of a prompt")?,
            self.output.range("an answer")?,
        );
        let mut random = ChaCha12Rng::seed_from_u64(seed);
        let requests = (0..requests).map(|_| {
            let prefix = random.random_range(0..self.prefixes);
            let rest = random.random_range(rest.0..=rest.1);
            let mut request = request(
                blocks * self.block_tokens + rest,
                random.random_range(output.0..=output.1),
            );
            request.prefix_blocks = self.ids(prefix, blocks);
            request
        });
        Ok(Trace {
            requests: requests.collect(),
            name: format!("{}, seed {seed}", self.words(blocks)),
            block_tokens: self.block_tokens,
        })
    }

    /// Brings each prefix into the cache: one request with its blocks, one further token, and an answer of one token.
    pub fn warm_up(&self) -> Result<Trace, ShapeError> {
        let blocks = self.blocks()?;
        check_requests(self.prefixes.into())?;
        let requests = (0..self.prefixes).map(|prefix| {
            let mut request = request(blocks * self.block_tokens + 1, 1);
            request.prefix_blocks = self.ids(prefix, blocks);
            request
        });
        Ok(Trace {
            requests: requests.collect(),
            name: format!("each of {} prefixes once", self.prefixes),
            block_tokens: self.block_tokens,
        })
    }

    fn ids(&self, prefix: u32, blocks: u32) -> Vec<u64> {
        (0..blocks)
            .map(|block| block_id(BLOCK_OF_PREFIX, prefix, block))
            .collect()
    }

    fn blocks(&self) -> Result<u32, ShapeError> {
        if self.block_tokens == 0 {
            return Err(ShapeError::Zero {
                what: "the size of a block",
            });
        }
        let blocks = self.prefix_tokens / self.block_tokens;
        for (what, count, max) in [
            ("the number of prefixes", self.prefixes, OWNERS_MAX),
            ("the number of whole blocks in a prefix", blocks, BLOCKS_MAX),
        ] {
            match count {
                0 => return Err(ShapeError::Zero { what }),
                _ if count > max => {
                    let (count, max) = (count.into(), max.into());
                    return Err(ShapeError::TooMany { what, count, max });
                }
                _ => {}
            }
        }
        Length::exactly(self.prefix_tokens).range("a prefix")?;
        Ok(blocks)
    }

    fn words(&self, blocks: u32) -> String {
        let (rest, output) = (self.rest.words(), self.output.words());
        format!(
            "one of {} prefixes of {} tokens, then {rest} tokens, answers of {output}",
            self.prefixes,
            blocks * self.block_tokens
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::facts::TraceFacts;

    const SHAPE: SharedPrefixes = SharedPrefixes {
        prefixes: 4,
        prefix_tokens: 1_030,
        block_tokens: 16,
        rest: Length {
            tokens: 100,
            range_ratio: 0.5,
        },
        output: Length::exactly(20),
    };

    #[test]
    fn prefixes_are_shared_and_the_rest_is_not() {
        let trace = SHAPE.trace(200, 1).expect("the shape is possible");
        let facts = TraceFacts::of(&trace).prefixes.expect("it has prefixes");
        assert_eq!((facts.blocks, facts.distinct_blocks), (200 * 64, 4 * 64));
        assert!(
            trace
                .requests
                .iter()
                .all(|request| (1_074..=1_174).contains(&request.prompt_tokens))
        );
        let warm_up = SHAPE.warm_up().expect("the shape is possible");
        let warm = super::super::merged("both", vec![warm_up, trace]).expect("their blocks are of one size");
        let facts = TraceFacts::of(&warm).prefixes.expect("it has prefixes");
        assert_eq!(
            facts.blocks - facts.distinct_blocks,
            200 * 64,
            "after the warm-up every block is a hit"
        );
    }

    #[test]
    fn impossible_prefixes_are_refused() {
        let refused = |shape: SharedPrefixes| shape.trace(1, 0).expect_err("it is impossible");
        assert!(matches!(
            refused(SharedPrefixes { prefixes: 0, ..SHAPE }),
            ShapeError::Zero { .. }
        ));
        assert!(matches!(
            refused(SharedPrefixes {
                block_tokens: 0,
                ..SHAPE
            }),
            ShapeError::Zero { .. }
        ));
        assert!(matches!(
            refused(SharedPrefixes {
                prefix_tokens: 15,
                ..SHAPE
            }),
            ShapeError::Zero { .. }
        ));
        let many = SharedPrefixes {
            prefixes: u32::MAX,
            ..SHAPE
        };
        assert!(matches!(refused(many), ShapeError::TooMany { .. }));
        assert!(matches!(SHAPE.trace(usize::MAX, 0), Err(ShapeError::TooMany { .. })));
        let many = SharedPrefixes {
            prefixes: OWNERS_MAX,
            ..SHAPE
        };
        assert!(matches!(many.warm_up(), Err(ShapeError::TooMany { .. })));
        let long = SharedPrefixes {
            prefix_tokens: u32::MAX,
            block_tokens: 2_000,
            ..SHAPE
        };
        assert!(matches!(refused(long), ShapeError::Tokens { .. }));
    }
}
