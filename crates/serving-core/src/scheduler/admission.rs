//! Letting a request in: what is checked, and which blocks are pinned and reserved.

use crate::kv::{BlockHandle, BlockUse, ChainLink};
use crate::request::{AttemptKey, Request};
use crate::scheduler::entry::{AfterPrompt, Choice, ChoiceState, Entry, Phase, StepAtAdmission};
use crate::scheduler::permits::growth_blocks;
use crate::scheduler::push::Push;
use crate::scheduler::refusal::check_request;
use crate::scheduler::sequence::Sequence;
use crate::scheduler::{Admission, Admitted, DraftCounts, InvalidRequest, Quarantined, Refusal, Scheduler, Work};
use crate::stage::StageTimings;
use crate::time::Time;

impl Work {
    /// Whether this node draws the answer, one token after the other.
    fn decodes(self) -> bool {
        match self {
            Work::Prefill(_) => false,
            Work::Decode(_) | Work::Whole => true,
        }
    }
}

impl Admission {
    fn key(&self) -> AttemptKey {
        AttemptKey {
            request: self.request.id,
            attempt: self.attempt,
        }
    }
    /// The number of sequences that it may become on this node.
    fn sequences(&self) -> u32 {
        if self.work.decodes() {
            self.request.choice_count
        } else {
            1
        }
    }
}

impl Scheduler {
    /// Lets a request in if the blocks that it needs first are free: blocks for its prompt beyond the cached prefix, and, if it decodes
    /// here, growth of min(remaining, two blocks) for each choice.
    ///
    /// # Errors
    /// A request that is refused holds no blocks. The permits that it carried count as used in both cases.
    pub fn admit(&mut self, now: Time, admission: Admission) -> Result<Admitted, Refusal> {
        self.permits.receive(admission.permits, admission.coordinator);
        let admitted = self.check(&admission).and_then(|()| self.reserve(now, admission));
        self.grant();
        admitted
    }

    fn check(&self, admission: &Admission) -> Result<(), Refusal> {
        let (request, key) = (&admission.request, admission.key());
        check_request(request, &self.config.limits).map_err(Refusal::Invalid)?;
        let peer = match admission.work {
            Work::Decode(_) if request.ends_at_first_token() => {
                return Err(Refusal::Invalid(InvalidRequest::NothingToDecode));
            }
            Work::Decode(transfer) => Quarantined::Transfer(transfer),
            Work::Prefill(_) | Work::Whole => Quarantined::Push(key),
        };
        if self.keys.contains_key(&key) || self.quarantine.contains_key(&peer) {
            return Err(Refusal::Duplicate);
        }
        let longest = match admission.work.decodes() {
            true => self.longest(request),
            false => request.prompt_tokens(),
        };
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
        if open > 0 && open.saturating_add(admission.sequences()) > limit {
            return Err(Refusal::TooManySequences { open, limit });
        }
        Ok(())
    }

    /// Prompt and outputs together, at most what the model takes.
    fn longest(&self, request: &Request) -> u32 {
        let wanted = request.prompt_tokens().saturating_add(request.remaining_tokens());
        wanted.min(self.config.limits.max_model_tokens)
    }

    fn reserve(&mut self, now: Time, admission: Admission) -> Result<Admitted, Refusal> {
        let request = &admission.request;
        let (mut prompt, prefix_blocks) = self.prompt_with_prefix(&admission);
        let prompt_blocks = self.pool.blocks_for(request.prompt_tokens());
        let rest = prompt_blocks - prefix_blocks;
        let growth = self.growth_of(&admission, self.pool.block_count() - prompt_blocks);
        let needed_blocks = rest + growth.iter().sum::<u32>();
        let available_blocks = self.pool.available();
        if needed_blocks > available_blocks {
            prompt.release(&mut self.pool);
            return Err(Refusal::NoBlocks {
                needed_blocks,
                available_blocks,
            });
        }
        let held_as = match admission.work {
            Work::Decode(_) => BlockUse::Reserved,
            Work::Prefill(_) | Work::Whole => BlockUse::Active,
        };
        let taken = self.pool.allocate(rest, held_as).unwrap_or_default();
        let ticket_blocks = match admission.work {
            Work::Decode(_) => ticket(&taken),
            Work::Prefill(_) | Work::Whole => Vec::new(),
        };
        prompt.table.extend(taken);
        let cached_tokens = prompt.computed;
        self.prefix_query_tokens += u64::from(request.prompt_tokens());
        self.prefix_hit_tokens += u64::from(cached_tokens);
        let choices = self.choices_of(prompt, growth);
        self.register(now, admission, (choices, prefix_blocks, cached_tokens));
        Ok(Admitted {
            prefix_blocks,
            cached_tokens,
            ticket_blocks,
        })
    }

    fn register(
        &mut self,
        now: Time,
        admission: Admission,
        (choices, prefix_blocks, cached_tokens): (Vec<Choice>, u32, u32),
    ) {
        let phase = match admission.work {
            Work::Decode(transfer) => Phase::Receiving {
                transfer,
                prefix_blocks,
                has_frames: false,
                heard_at: None,
            },
            Work::Prefill(_) | Work::Whole => Phase::Prompt { first_chunk_at: None },
        };
        let after_prompt = match admission.work {
            Work::Prefill(Some(plan)) => AfterPrompt::HandOver(Push::new(plan)),
            Work::Prefill(None) => AfterPrompt::End,
            Work::Decode(_) | Work::Whole => AfterPrompt::Decode,
        };
        let entry = Entry {
            key: admission.key(),
            phase,
            after_prompt,
            deadline: now + admission.request.time_limit,
            request: admission.request,
            choices,
            cached_tokens,
            preemptions: 0,
            drafts: DraftCounts::default(),
            timings: StageTimings::default(),
            admitted_at: now,
            step_at_admission: match self.plan.is_empty() {
                true => StepAtAdmission::None,
                false => StepAtAdmission::Running,
            },
            ready_at: now,
            joined_at: None,
            last_token_at: None,
        };
        self.keys.insert(entry.key, self.next_serial);
        self.entries.insert(self.next_serial, entry);
        self.next_serial += 1;
    }

    /// The sequence of choice 0, with the blocks that are cached here already. It has capacity for all its tokens, so that its growth
    /// allocates no memory.
    fn prompt_with_prefix(&mut self, admission: &Admission) -> (Sequence, u32) {
        let request = &admission.request;
        let longest = match admission.work.decodes() {
            true => self.longest(request),
            false => request.prompt_tokens(),
        };
        let mut prompt = Sequence::empty(ChainLink::root(request.prefix_salt).counted_for(request.cache_tenant));
        let room = (longest as usize).max(request.prompt.len());
        prompt.tokens.reserve_exact(room);
        prompt.tokens.extend_from_slice(&request.prompt);
        let prefix_blocks = match request.prompt_logprobs {
            Some(_) => 0,
            None => prompt.take_prefix(&mut self.pool),
        };
        prompt.table.reserve(self.pool.blocks_for(longest) as usize);
        (prompt, prefix_blocks)
    }

    /// Choice 0 starts with the prompt. The other choices start with their growth blocks only.
    fn choices_of(&mut self, prompt: Sequence, growth: Vec<u32>) -> Vec<Choice> {
        let root = prompt.root();
        let mut first = Some(prompt);
        let mut choices = Vec::with_capacity(growth.len());
        for blocks in growth {
            let mut sequence = first.take().unwrap_or_else(|| Sequence::empty(root));
            sequence.spare = self.pool.allocate(blocks, BlockUse::Reserved).unwrap_or_default();
            choices.push(Choice {
                sequence,
                state: ChoiceState::Waiting,
                draft_tokens: self.config.speculative_tokens,
            });
        }
        choices
    }

    /// Growth blocks for each sequence, at most `room` in all. Missing blocks are found later, or another sequence is preempted for them.
    fn growth_of(&self, admission: &Admission, room: u32) -> Vec<u32> {
        if !admission.work.decodes() {
            return vec![0];
        }
        let (request, block_tokens) = (&admission.request, self.pool.block_tokens());
        let mut left = room;
        let wanted = (0..request.choice_count).map(|choice| growth_blocks(request, block_tokens, choice == 0));
        wanted
            .map(|blocks| {
                let given = blocks.min(left);
                left -= given;
                given
            })
            .collect()
    }
}

fn ticket(taken: &[BlockHandle]) -> Vec<(crate::ids::BlockId, crate::ids::Generation)> {
    taken.iter().map(|hold| (hold.block(), hold.generation())).collect()
}
