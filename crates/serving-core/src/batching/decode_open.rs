//! Letting a request into a decode node: what is checked, and which blocks are pinned and reserved.

use crate::batching::decode::{DecodeBatcher, OpenCommand, Opened, PromptSource};
use crate::batching::decode_entry::{Choice, ChoiceState, DecodeEntry, DecodePhase};
use crate::batching::permits::growth_blocks;
use crate::batching::sequence::Sequence;
use crate::batching::{InvalidRequest, Refusal, check_request};
use crate::kv::BlockUse;
use crate::request::{AttemptKey, Request};
use crate::stage::StageTimings;
use crate::time::Time;

impl DecodeBatcher {
    pub(super) fn check_open(&self, command: &OpenCommand) -> Result<(), Refusal> {
        let request = &command.request;
        let limits = &self.config.limits;
        check_request(request, limits).map_err(Refusal::Invalid)?;
        if matches!(command.source, PromptSource::Handoff(_)) && request.ends_at_first_token() {
            return Err(Refusal::Invalid(InvalidRequest::NothingToDecode));
        }
        if self.keys.contains_key(&AttemptKey {
            request: request.id,
            attempt: command.attempt,
        }) || matches!(command.source, PromptSource::Handoff(id) if self.quarantine.contains_key(&id))
        {
            return Err(Refusal::Duplicate);
        }
        let longest = request
            .prompt_tokens()
            .saturating_add(request.remaining_tokens())
            .min(limits.max_model_tokens);
        let (needed_blocks, pool_blocks) = (self.pool.blocks_for(longest), self.pool.block_count());
        if needed_blocks > pool_blocks {
            return Err(Refusal::NeverFits {
                needed_blocks,
                pool_blocks,
            });
        }
        if self.has_preempted() {
            return Err(Refusal::Preempting);
        }
        let (open, limit) = (self.open_sequences(), self.most_sequences());
        if open > 0 && open.saturating_add(request.choice_count) > limit {
            return Err(Refusal::TooManySequences { open, limit });
        }
        Ok(())
    }

    pub(super) fn reserve(&mut self, now: Time, command: OpenCommand) -> Result<Opened, Refusal> {
        let request = command.request;
        let (mut prompt, prefix_blocks) = self.prompt_with_prefix(&request);
        let prompt_blocks = self.pool.blocks_for(request.prompt_tokens());
        let rest = prompt_blocks - prefix_blocks;
        let growth = self.growth_of(&request, self.pool.block_count() - prompt_blocks);
        let needed_blocks = rest + growth.iter().sum::<u32>();
        let available_blocks = self.pool.available();
        if needed_blocks > available_blocks {
            prompt.release(&mut self.pool);
            return Err(Refusal::NoBlocks {
                needed_blocks,
                available_blocks,
            });
        }
        let (held_as, phase) = match command.source {
            PromptSource::Handoff(transfer) => {
                let phase = DecodePhase::Receiving {
                    transfer,
                    prefix_blocks,
                    has_frames: false,
                    heard_at: None,
                };
                (BlockUse::Reserved, phase)
            }
            PromptSource::Local(_) => (BlockUse::Active, DecodePhase::LocalPrefill { first_chunk_at: None }),
        };
        let taken = self.pool.allocate(rest, held_as).unwrap_or_default();
        let ticket_blocks = match command.source {
            PromptSource::Handoff(_) => taken.iter().map(|hold| (hold.block(), hold.generation())).collect(),
            PromptSource::Local(_) => Vec::new(),
        };
        prompt.table.extend(taken);
        let cached_tokens = prompt.computed;
        self.prefix_query_tokens += u64::from(request.prompt_tokens());
        self.prefix_hit_tokens += u64::from(cached_tokens);
        let choices = self.choices_of(prompt, growth);
        self.register(DecodeEntry {
            key: AttemptKey {
                request: request.id,
                attempt: command.attempt,
            },
            phase,
            deadline: now + request.time_limit,
            request,
            choices,
            cached_tokens,
            preemptions: 0,
            timings: StageTimings::default(),
            opened_at: now,
            ready_at: now,
            joined_at: None,
        });
        Ok(Opened {
            prefix_blocks,
            cached_tokens,
            ticket_blocks,
        })
    }

    fn register(&mut self, entry: DecodeEntry) {
        self.keys.insert(entry.key, self.next_serial);
        self.entries.insert(self.next_serial, entry);
        self.next_serial += 1;
    }

    /// Choice 0's sequence with the blocks that are here already, and room for all its tokens, so that growth does not
    /// allocate.
    fn prompt_with_prefix(&mut self, request: &Request) -> (Sequence, u32) {
        let mut prompt = Sequence::empty();
        let longest = request.prompt_tokens().saturating_add(request.remaining_tokens());
        let longest = longest.min(self.config.limits.max_model_tokens);
        prompt
            .tokens
            .reserve_exact((longest as usize).max(request.prompt.len()));
        prompt.tokens.extend_from_slice(&request.prompt);
        let prefix_blocks = match request.prompt_logprobs {
            Some(_) => 0,
            None => prompt.take_prefix(&mut self.pool),
        };
        prompt.table.reserve(self.pool.blocks_for(longest) as usize);
        (prompt, prefix_blocks)
    }

    /// Choice 0 starts with the prompt, the others with nothing but their growth.
    fn choices_of(&mut self, prompt: Sequence, growth: Vec<u32>) -> Vec<Choice> {
        let mut first = Some(prompt);
        let mut choices = Vec::with_capacity(growth.len());
        for blocks in growth {
            let mut sequence = first.take().unwrap_or_else(Sequence::empty);
            sequence.spare = self.pool.allocate(blocks, BlockUse::Reserved).unwrap_or_default();
            choices.push(Choice {
                sequence,
                state: ChoiceState::Waiting,
            });
        }
        choices
    }

    /// Growth blocks per choice, at most `room` together: what is missing is found, or preempted for, later.
    fn growth_of(&self, request: &Request, room: u32) -> Vec<u32> {
        let mut left = room;
        let wanted =
            (0..request.choice_count).map(|choice| growth_blocks(request, self.pool.block_tokens(), choice == 0));
        wanted
            .map(|blocks| {
                let given = blocks.min(left);
                left -= given;
                given
            })
            .collect()
    }
}
