//! Puts the tokens of one choice in order. Two legs may bring the same token, and each token comes out once.

use std::collections::BTreeMap;

use serving_core::ids::TokenId;
use serving_core::request::TokenEvent;

use crate::request_handle::TokenTimes;

/// Most tokens of a choice that wait for an earlier token. Each leg is in order and starts at the first index, so few ever wait.
const REORDER_MAX: usize = 64;

#[derive(Debug, Default)]
pub(super) struct Choice {
    /// The index of the token that the client gets next.
    pub next_index: u32,
    first_token: Option<TokenId>,
    pub is_finished: bool,
    /// Tokens that came before an earlier one.
    early: BTreeMap<u32, (TokenEvent, TokenTimes)>,
}

impl Choice {
    /// A new attempt brings these tokens itself.
    pub(super) fn forget_early(&mut self) {
        self.early.clear();
    }

    /// Puts one token into its place. Fails if the nodes broke the contract. Returns the tokens that can be handed over now, in order.
    pub(super) fn accept(
        &mut self,
        token: TokenEvent,
        times: TokenTimes,
    ) -> Result<Vec<(TokenEvent, TokenTimes)>, String> {
        let choice_number = token.choice;
        let index = token.index.0;
        if index < self.next_index {
            // Both legs bring index 0. They must agree, or one of them answers another request.
            if index == 0 && self.first_token.is_some_and(|first| first != token.token) {
                return Err(format!("choice {choice_number} has two different first tokens"));
            }
            return Ok(Vec::new());
        }
        if self.is_finished {
            return Ok(Vec::new());
        }
        if self.early.len() >= REORDER_MAX {
            return Err(format!("choice {choice_number} has a gap at token {}", self.next_index));
        }
        self.early.insert(index, (token, times));
        let mut ready = Vec::new();
        while let Some((token, times)) = self.early.remove(&self.next_index) {
            self.first_token.get_or_insert(token.token);
            self.next_index += 1;
            self.is_finished |= token.finish.is_some();
            ready.push((token, times));
        }
        Ok(ready)
    }
}
