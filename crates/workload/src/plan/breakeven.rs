//! From which prompt length and over which link disaggregation can pay.
//!
//! The model. A prompt of N tokens takes N x c seconds of a node. On a co-located node it shares steps with running streams:
//! a step computes at most B of its tokens (the chunk budget), so the worst gap of a running stream grows by min(N, B) x c,
//! and each stream falls behind by N x c in all. With two pools running streams feel nothing, but the KV of the prompt moves:
//! while later chunks are computed the earlier ones travel, so only the rest that is still under way when the prompt ends
//! is felt, once, by the new stream, between its first and second token. With f tokens in the first chunk and m in the last
//! one, k KV bytes a token, a link of r bytes a second and h seconds of messages, that rest is
//! h + max(m x k / r, f x c + N x k / r - N x c): the last chunk's own way, or the queue on a link that is slower than the
//! computing. A prompt of one chunk hides nothing: f and m are N. Disaggregation can pay where that rest is shorter than the
//! growth of the worst gap, and where the co-located worst gap breaks the limit at all.
//!
//! What the model leaves out: nodes of an idle pool are a cost, transfers of several prompts share a link, and attention makes
//! later tokens of a long prompt dearer. So "can pay" is necessary and not sufficient; `baton compare` measures.

use super::PlanError;
use super::check::{not_negative, positive};

/// Lengths above this are not searched.
pub const PROMPT_TOKENS_MAX: u32 = 131_072;

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Costs {
    /// Seconds for one prompt token.
    pub prefill_s: f64,
    /// Seconds of a step of the running streams, without a prompt.
    pub step_s: f64,
    /// Prompt tokens in one step of a co-located node. `None`: whole prompts.
    pub chunk_tokens: Option<u32>,
    /// Prompt tokens in one step of a prefill node.
    pub prefill_chunk_tokens: u32,
    /// Prompt tokens in the last chunk of a prompt of several chunks.
    pub last_chunk_tokens: u32,
    pub kv_bytes_per_token: f64,
    /// Seconds of a handoff beside its bytes.
    pub handoff_s: f64,
    /// The longest gap between tokens that is allowed.
    pub gap_limit_s: f64,
}

impl Costs {
    fn checked(self) -> Result<Self, PlanError> {
        positive("the prefill cost", self.prefill_s)?;
        positive("the time of a step", self.step_s)?;
        positive("the chunk budget", f64::from(self.chunk_tokens.unwrap_or(1)))?;
        positive("the chunk of a prefill node", f64::from(self.prefill_chunk_tokens))?;
        positive("the last chunk", f64::from(self.last_chunk_tokens))?;
        positive("the KV of a token", self.kv_bytes_per_token)?;
        not_negative("the time of a handoff", self.handoff_s)?;
        positive("the limit of a gap", self.gap_limit_s)?;
        Ok(self)
    }

    fn prompt_s(self, tokens: u32) -> f64 {
        f64::from(tokens) * self.prefill_s
    }

    /// By how much the worst gap of a running stream grows on a co-located node.
    fn stall_s(self, tokens: u32) -> f64 {
        self.prompt_s(self.chunk_tokens.map_or(tokens, |chunk| chunk.min(tokens)))
    }

    fn rest_of_transfer_s(self, tokens: u32, rate: f64) -> f64 {
        let moved = |tokens: u32| f64::from(tokens) * self.kv_bytes_per_token / rate;
        let queued = moved(tokens) - self.hidden_s(tokens);
        self.handoff_s + moved(self.last_chunk(tokens)).max(queued)
    }

    fn last_chunk(self, tokens: u32) -> u32 {
        match tokens <= self.prefill_chunk_tokens {
            true => tokens,
            false => self.last_chunk_tokens.min(tokens),
        }
    }

    /// Computing that goes on while KV already moves: all of it after the first chunk.
    fn hidden_s(self, tokens: u32) -> f64 {
        self.prompt_s(tokens.saturating_sub(self.prefill_chunk_tokens))
    }
}

/// What the model says of one prompt length over one link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// Co-located nodes keep the limit, so there is nothing to gain.
    LimitIsKept,
    /// The transfer is felt more than the stall that it avoids.
    LinkTooSlow,
    CanPay,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cell {
    /// Growth of the worst gap of running streams, co-located.
    pub stall_s: f64,
    /// What is felt of the transfer, once, by the new stream.
    pub transfer_s: f64,
    pub answer: Answer,
}

/// # Errors
/// An input is not above 0.
pub fn cell(costs: Costs, tokens: u32, rate: f64) -> Result<Cell, PlanError> {
    let costs = costs.checked()?;
    positive("the prompt's length", f64::from(tokens))?;
    let rate = positive("the link's rate", rate)?;
    Ok(judged(costs, tokens, rate))
}

fn judged(costs: Costs, tokens: u32, rate: f64) -> Cell {
    let (stall_s, transfer_s) = (costs.stall_s(tokens), costs.rest_of_transfer_s(tokens, rate));
    let answer = if costs.step_s + stall_s <= costs.gap_limit_s {
        Answer::LimitIsKept
    } else if transfer_s >= stall_s {
        Answer::LinkTooSlow
    } else {
        Answer::CanPay
    };
    Cell {
        stall_s,
        transfer_s,
        answer,
    }
}

/// The shortest and the longest prompt for which disaggregation can pay over a link. `None`: for no length up to
/// [`PROMPT_TOKENS_MAX`]. With a chunk budget the stall has a limit and the queue on a slow link has none, so there may be an
/// upper end. Not every length between the two need pay: a prompt just below the chunk of a prefill node hides nothing.
///
/// # Errors
/// An input is not above 0.
pub fn lengths(costs: Costs, rate: f64) -> Result<Option<(u32, u32)>, PlanError> {
    let costs = costs.checked()?;
    let rate = positive("the link's rate", rate)?;
    let pays = |tokens: &u32| judged(costs, *tokens, rate).answer == Answer::CanPay;
    let first = (1..=PROMPT_TOKENS_MAX).find(pays);
    let last = (1..=PROMPT_TOKENS_MAX).rev().find(pays);
    Ok(first.zip(last))
}

/// The slowest link, in bytes a second, over which disaggregation can pay for a prompt length. `None`: no link is fast enough,
/// or co-located nodes keep the limit.
///
/// # Errors
/// An input is not above 0.
pub fn slowest_link(costs: Costs, tokens: u32) -> Result<Option<f64>, PlanError> {
    let costs = costs.checked()?;
    positive("the prompt's length", f64::from(tokens))?;
    let stall = costs.stall_s(tokens);
    let room = stall - costs.handoff_s;
    if room <= 0.0 || costs.step_s + stall <= costs.gap_limit_s {
        return Ok(None);
    }
    let bytes = |tokens: u32| f64::from(tokens) * costs.kv_bytes_per_token;
    let (last, all) = (bytes(costs.last_chunk(tokens)), bytes(tokens));
    Ok(Some((last / room).max(all / (room + costs.hidden_s(tokens)))))
}

#[cfg(test)]
mod tests {
    use super::*;

    const COSTS: Costs = Costs {
        prefill_s: 100e-6,
        step_s: 0.010,
        chunk_tokens: None,
        prefill_chunk_tokens: 256,
        last_chunk_tokens: 32,
        kv_bytes_per_token: 131_072.0,
        handoff_s: 0.002,
        gap_limit_s: 0.050,
    };

    #[test]
    fn a_short_prompt_breaks_no_limit_and_a_long_one_pays_over_a_fast_link() {
        let over = |tokens, gbit: f64| cell(COSTS, tokens, gbit * 1e9 / 8.0).unwrap().answer;
        // 400 tokens take 40 ms: the gap of 50 ms is just allowed.
        assert_eq!(over(400, 100.0), Answer::LimitIsKept);
        assert_eq!(over(401, 100.0), Answer::CanPay);
        assert_eq!(over(2_000, 0.1), Answer::LinkTooSlow);
        assert_eq!(lengths(COSTS, 12.5e9).unwrap(), Some((401, PROMPT_TOKENS_MAX)));
    }

    /// Counted by hand: 1,000 tokens in chunks of 256 and a last one of 32, over links that take 50 us and 150 us a token.
    #[test]
    fn a_fast_link_shows_its_last_chunk_and_a_slow_link_its_queue() {
        let rate_of = |us: f64| COSTS.kv_bytes_per_token / (us * 1e-6);
        let fast = cell(COSTS, 1_000, rate_of(50.0)).unwrap();
        assert!((fast.transfer_s - (0.002 + 32.0 * 50e-6)).abs() < 1e-9);
        let slow = cell(COSTS, 1_000, rate_of(150.0)).unwrap();
        assert!((slow.transfer_s - (0.002 + 0.0256 + 0.150 - 0.100)).abs() < 1e-9);
        let short = cell(COSTS, 100, rate_of(150.0)).unwrap();
        assert!(
            (short.transfer_s - (0.002 + 0.015)).abs() < 1e-9,
            "one chunk, nothing hidden"
        );
    }

    #[test]
    fn with_chunks_a_slow_link_pays_for_a_range_only() {
        let chunked = Costs {
            chunk_tokens: Some(512),
            ..COSTS
        };
        let rate = chunked.kv_bytes_per_token / 110e-6;
        let (first, last) = lengths(chunked, rate).unwrap().unwrap();
        assert_eq!(first, 401);
        assert!((2_000..3_000).contains(&last), "{last}");
        let small = Costs {
            chunk_tokens: Some(256),
            ..COSTS
        };
        assert_eq!(
            lengths(small, 450e9).unwrap(),
            None,
            "chunks of 256 tokens keep the limit"
        );
    }

    #[test]
    fn the_slowest_link_is_where_the_answer_changes() {
        for chunk_tokens in [None, Some(512), Some(2_048)] {
            for tokens in [450, 1_000, 5_000, 50_000] {
                let costs = Costs { chunk_tokens, ..COSTS };
                let rate = slowest_link(costs, tokens).unwrap().expect("a fast link pays");
                assert_eq!(cell(costs, tokens, rate * 1.000_001).unwrap().answer, Answer::CanPay);
                assert_eq!(
                    cell(costs, tokens, rate * 0.999_999).unwrap().answer,
                    Answer::LinkTooSlow
                );
            }
        }
        assert_eq!(slowest_link(COSTS, 100), Ok(None));
        let slow_messages = Costs {
            handoff_s: 1.0,
            ..COSTS
        };
        assert_eq!(slowest_link(slow_messages, 1_000), Ok(None));
    }

    #[test]
    fn bad_inputs_are_typed_errors() {
        for bad in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert!(
                cell(
                    Costs {
                        prefill_s: bad,
                        ..COSTS
                    },
                    100,
                    1e9
                )
                .is_err()
            );
            assert!(cell(Costs { step_s: bad, ..COSTS }, 100, 1e9).is_err());
            assert!(
                cell(
                    Costs {
                        gap_limit_s: bad,
                        ..COSTS
                    },
                    100,
                    1e9
                )
                .is_err()
            );
            assert!(cell(COSTS, 100, bad).is_err());
            assert!(lengths(COSTS, bad).is_err());
            let costs = Costs {
                kv_bytes_per_token: bad,
                ..COSTS
            };
            assert!(slowest_link(costs, 100).is_err());
        }
        assert!(cell(COSTS, 0, 1e9).is_err());
        let costs = Costs {
            chunk_tokens: Some(0),
            ..COSTS
        };
        assert!(cell(costs, 100, 1e9).is_err());
    }
}
