//! The token ids of a prompt, drawn from the seed and the trace's prefix blocks.

use std::ops::Range;

use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use workload::trace::TraceRequest;

/// Equal blocks give equal tokens, in every run with the same seed.
#[derive(Clone, Copy, Debug)]
pub(super) struct PromptTokens {
    seed: u64,
    block_tokens: u32,
}

impl PromptTokens {
    pub(super) fn new(seed: u64, block_tokens: u32) -> Self {
        Self { seed, block_tokens }
    }

    /// As many ids as the prompt has tokens. `salt` tells the prompts apart that share nothing.
    pub(super) fn of(self, request: &TraceRequest, salt: u64, ids: Range<u32>) -> Vec<u32> {
        let length = request.prompt_tokens as usize;
        let mut tokens = Vec::with_capacity(length);
        for block in request.prefix_blocks.iter().take_while(|_| self.block_tokens > 0) {
            let mut random = self.generator(0, *block);
            let room = (length - tokens.len()).min(self.block_tokens as usize);
            tokens.extend((0..room).map(|_| random.random_range(ids.clone())));
        }
        let mut random = self.generator(1, salt);
        let rest = length - tokens.len();
        tokens.extend((0..rest).map(|_| random.random_range(ids.clone())));
        tokens
    }

    fn generator(self, kind: u8, number: u64) -> StdRng {
        let mut seed = [0; 32];
        seed[..8].copy_from_slice(&self.seed.to_le_bytes());
        seed[8..16].copy_from_slice(&number.to_le_bytes());
        seed[16] = kind;
        StdRng::from_seed(seed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serving_core::request::Lane;
    use std::time::Duration;

    fn request(prompt_tokens: u32, prefix_blocks: &[u64]) -> TraceRequest {
        TraceRequest {
            at: Duration::ZERO,
            prompt_tokens,
            output_tokens: 1,
            prefix_blocks: prefix_blocks.to_vec(),
            lane: Lane::Interactive,
            conversation: None,
        }
    }

    #[test]
    fn equal_blocks_have_equal_tokens_and_the_rest_differs() {
        let tokens = PromptTokens::new(1, 16);
        let of = |prompt_tokens, blocks: &[u64], salt| tokens.of(&request(prompt_tokens, blocks), salt, 10..1000);
        let (a, b) = (of(40, &[7, 8, 9], 0), of(36, &[7, 8, 5], 1));
        assert_eq!((a.len(), b.len()), (40, 36));
        assert_eq!(a[..32], b[..32]);
        assert_ne!(a[32..36], b[32..36]);
        assert!(a.iter().all(|id| (10..1000).contains(id)));
        let (c, d) = (of(20, &[], 0), of(20, &[], 1));
        assert_ne!(c, d);
        assert_eq!(c, of(20, &[], 0));
        assert_ne!(c, PromptTokens::new(2, 16).of(&request(20, &[]), 0, 10..1000));
    }
}
