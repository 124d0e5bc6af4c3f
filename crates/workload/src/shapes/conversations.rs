//! Conversations of several turns. A turn's prompt is everything that was said before, and the new message.

use std::time::Duration;

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha12Rng;
use rand_distr::{Distribution, Exp1};

use super::{
    BLOCK_OF_CONVERSATION, BLOCK_OF_PREFIX, BLOCKS_MAX, Length, OWNERS_MAX, ShapeError, block_id, check_requests,
    request,
};
use crate::trace::{Trace, TraceRequest, Turn, block_count};

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Conversations {
    pub conversations: u32,
    pub turns: u32,
    /// What all conversations begin with. 0: nothing.
    pub system_tokens: u32,
    /// The user's message of each turn.
    pub message: Length,
    pub output: Length,
    /// Mean of the times between an answer and the next message, which are exponentially distributed.
    pub think_time: Duration,
    pub block_tokens: u32,
    /// The longest prompt with its answer that may come.
    pub context_tokens_max: Option<u32>,
}

impl Conversations {
    /// Turns are in the order of their earliest times. Answers take no time there: a turn is sent when the answer before it has come.
    pub fn trace(&self, seed: u64) -> Result<Trace, ShapeError> {
        self.check()?;
        let mut random = ChaCha12Rng::seed_from_u64(seed);
        let mut requests = Vec::new();
        for conversation in 0..self.conversations {
            requests.extend(self.conversation(conversation, &mut random)?);
        }
        requests.sort_by_key(|request| request.at);
        Ok(Trace {
            name: format!("{}, seed {seed}", self.words()),
            block_tokens: self.block_tokens,
            requests,
        })
    }

    fn conversation(&self, conversation: u32, random: &mut ChaCha12Rng) -> Result<Vec<TraceRequest>, ShapeError> {
        let (message, output) = (self.message.range("a message")?, self.output.range("an answer")?);
        let mut said = self.system_tokens;
        let mut at = Duration::ZERO;
        let mut turns = Vec::new();
        for turn in 0..self.turns {
            let prompt_tokens = said + random.random_range(message.0..=message.1);
            let output_tokens = random.random_range(output.0..=output.1);
            said = prompt_tokens + output_tokens;
            let think_time = match turn {
                0 => Duration::ZERO,
                _ => self.think_time.mul_f64(Exp1.sample(random)),
            };
            at = at.saturating_add(think_time);
            turns.push(TraceRequest {
                at,
                prefix_blocks: self.ids(conversation, prompt_tokens)?,
                conversation: Some(Turn {
                    conversation: conversation.into(),
                    turn,
                    think_time,
                }),
                ..request(prompt_tokens, output_tokens)
            });
        }
        Ok(turns)
    }

    /// Whole blocks of what all begin with are shared by all; every other block, the last one as well, by the turns of one conversation.
    fn ids(&self, conversation: u32, prompt_tokens: u32) -> Result<Vec<u64>, ShapeError> {
        let shared = self.system_tokens / self.block_tokens;
        let blocks = block_count(prompt_tokens, self.block_tokens);
        let blocks = u32::try_from(blocks).unwrap_or(u32::MAX);
        if blocks > BLOCKS_MAX {
            let (count, max) = (blocks.into(), BLOCKS_MAX.into());
            let what = "the number of blocks in a conversation";
            return Err(ShapeError::TooMany { what, count, max });
        }
        let id = |block| match block < shared {
            true => block_id(BLOCK_OF_PREFIX, OWNERS_MAX, block),
            false => block_id(BLOCK_OF_CONVERSATION, conversation, block),
        };
        Ok((0..blocks).map(id).collect())
    }

    fn check(&self) -> Result<(), ShapeError> {
        for (what, count) in [
            ("the number of conversations", self.conversations),
            ("the number of turns", self.turns),
            ("the size of a block", self.block_tokens),
        ] {
            if count == 0 {
                return Err(ShapeError::Zero { what });
            }
        }
        if self.conversations > OWNERS_MAX {
            let (count, max) = (self.conversations.into(), OWNERS_MAX.into());
            let what = "the number of conversations";
            return Err(ShapeError::TooMany { what, count, max });
        }
        let (message, output) = (self.message.range("a message")?, self.output.range("an answer")?);
        let longest = u64::from(self.turns) * u64::from(message.1 + output.1) + u64::from(self.system_tokens);
        let max = self.context_tokens_max.unwrap_or(super::TOKENS_MAX);
        match u32::try_from(longest) {
            Ok(longest) if longest <= max => check_requests(u64::from(self.conversations) * u64::from(self.turns)),
            longest => Err(ShapeError::Context {
                needed: longest.unwrap_or(u32::MAX),
                context_tokens_max: max,
            }),
        }
    }

    fn words(&self) -> String {
        let (message, output) = (self.message.words(), self.output.words());
        let (conversations, turns, think) = (self.conversations, self.turns, self.think_time.as_secs_f64());
        let system = match self.system_tokens {
            0 => String::new(),
            tokens => format!(", {tokens} tokens before the first one"),
        };
        format!(
            "{conversations} conversations of {turns} turns, messages of {message} and answers of {output} tokens{system}, {think} s to think"
        )
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;
    use crate::arrivals::Arrivals;

    const SHAPE: Conversations = Conversations {
        conversations: 50,
        turns: 6,
        system_tokens: 100,
        message: Length {
            tokens: 60,
            range_ratio: 0.5,
        },
        output: Length {
            tokens: 40,
            range_ratio: 0.5,
        },
        think_time: Duration::from_secs(5),
        block_tokens: 16,
        context_tokens_max: Some(2_048),
    };

    fn turns(trace: &Trace) -> BTreeMap<u64, Vec<&TraceRequest>> {
        let mut turns: BTreeMap<u64, Vec<&TraceRequest>> = BTreeMap::new();
        for request in &trace.requests {
            let turn = request.conversation.expect("all requests are turns");
            turns.entry(turn.conversation).or_default().push(request);
        }
        turns
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(40))]

        /// A turn begins with all of the prompt and the answer before it, and never comes before its conversation's earlier turns.
        #[test]
        fn turns_chain(seed in any::<u64>()) {
            let trace = SHAPE.trace(seed).expect("the shape is possible");
            let trace = Arrivals::poisson(2.0).apply(trace, seed).expect("the rate is possible");
            prop_assert!(trace.requests.windows(2).all(|pair| pair[0].at <= pair[1].at));
            let turns = turns(&trace);
            prop_assert_eq!(turns.len(), 50);
            for requests in turns.values() {
                prop_assert_eq!(requests.len(), 6);
                for (number, pair) in requests.windows(2).enumerate() {
                    let [before, after] = [pair[0], pair[1]];
                    let turn = after.conversation.expect("all requests are turns");
                    prop_assert_eq!(turn.turn as usize, number + 1);
                    prop_assert_eq!(after.at, before.at + turn.think_time);
                    let message = after.prompt_tokens - before.prompt_tokens - before.output_tokens;
                    prop_assert!((30..=90).contains(&message));
                    prop_assert!(after.prefix_blocks.starts_with(&before.prefix_blocks));
                }
            }
        }
    }

    #[test]
    fn whole_blocks_of_the_system_prompt_are_shared() {
        let trace = SHAPE.trace(1).expect("the shape is possible");
        let turns = turns(&trace);
        let (one, other) = (&turns[&0][0].prefix_blocks, &turns[&1][0].prefix_blocks);
        assert_eq!(one[..6], other[..6]);
        assert!(one[6..].iter().all(|id| !other.contains(id)));
    }

    #[test]
    fn think_times_have_their_mean() {
        let trace = Conversations {
            conversations: 1_000,
            ..SHAPE
        }
        .trace(7)
        .expect("the shape is possible");
        let last = turns(&trace)
            .values()
            .map(|requests| requests[5].at.as_secs_f64())
            .sum::<f64>();
        // 5,000 times of mean 5 s; the standard error of their mean is 1.4 %.
        assert!((last / 25_000.0 - 1.0).abs() < 0.06, "{last}");
    }

    #[test]
    fn impossible_conversations_are_refused() {
        let refused = |shape: Conversations| shape.trace(0).expect_err("it is impossible");
        let context = refused(Conversations {
            context_tokens_max: Some(999),
            ..SHAPE
        });
        assert_eq!(
            context,
            ShapeError::Context {
                needed: 1_000,
                context_tokens_max: 999
            }
        );
        assert!(matches!(
            refused(Conversations { turns: 0, ..SHAPE }),
            ShapeError::Zero { .. }
        ));
        let many = Conversations {
            turns: u32::MAX,
            context_tokens_max: None,
            ..SHAPE
        };
        assert!(matches!(refused(many), ShapeError::Context { .. }));
        let many = Conversations {
            conversations: u32::MAX,
            ..SHAPE
        };
        assert!(matches!(refused(many), ShapeError::TooMany { .. }));
        let many = Conversations {
            conversations: OWNERS_MAX,
            ..SHAPE
        };
        assert!(matches!(refused(many), ShapeError::TooMany { .. }));
    }
}
