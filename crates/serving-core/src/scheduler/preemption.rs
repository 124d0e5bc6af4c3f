//! Places in the batch and blocks to grow into: who gets them, who loses them, who gets them back.

use crate::kv::{BlockPool, BlockUse};
use crate::request::AttemptKey;
use crate::scheduler::Scheduler;
use crate::scheduler::entry::{ChoiceState, Entry};
use crate::scheduler::sequence::Sequence;

impl Scheduler {
    /// Fills free places of the batch: preempted sequences first, then in order of arrival.
    pub(super) fn admit_to_batch(&mut self) {
        let running = self.entries.values().map(|entry| entry.count(ChoiceState::Running));
        let mut places = self.config.limits.max_sequences.saturating_sub(running.sum());
        let mut may_resume = true;
        for state in [ChoiceState::Preempted, ChoiceState::Waiting] {
            for entry in self.entries.values_mut() {
                let schedulable = entry.schedulable();
                let choices = entry.choices[..schedulable].iter_mut();
                for choice in choices.filter(|choice| choice.state == state) {
                    if places == 0 {
                        return;
                    }
                    if state == ChoiceState::Preempted {
                        // In order: a younger one must not take the blocks that the older one waits for.
                        may_resume = may_resume && take_blocks_again(&mut choice.sequence, &mut self.pool);
                        if !may_resume {
                            continue;
                        }
                    }
                    choice.state = ChoiceState::Running;
                    places -= 1;
                }
            }
        }
    }

    /// Gets the block for a sequence's next row, preempting the youngest sequences until there is one. False when the
    /// sequence itself was (or had been) preempted.
    pub(super) fn make_room(&mut self, serial: u64, choice: u32) -> bool {
        loop {
            let Some(entry) = self.entries.get_mut(&serial) else {
                return false;
            };
            let own = &mut entry.choices[choice as usize];
            if own.state != ChoiceState::Running {
                return false;
            }
            let end = own.sequence.len();
            if own.sequence.grow_to(&mut self.pool, end) {
                return true;
            }
            // Rows are planned oldest first, so the youngest is never one that is planned already; at the latest it
            // is this sequence itself, which ends the loop.
            self.preempt_youngest();
        }
    }

    fn preempt_youngest(&mut self) {
        for entry in self.entries.values_mut().rev().filter(|entry| entry.is_committed()) {
            let mut choices = entry.choices.iter_mut().rev();
            let victim = choices.find(|choice| {
                matches!(choice.state, ChoiceState::Running | ChoiceState::Waiting) && choice.sequence.holds_blocks()
            });
            if let Some(victim) = victim {
                victim.sequence.release(&mut self.pool);
                victim.state = ChoiceState::Preempted;
                entry.preemptions += 1;
                self.preemptions += 1;
                return;
            }
        }
    }

    /// How often a request has lost its blocks to older ones until now.
    pub fn preemptions_of(&self, key: AttemptKey) -> u32 {
        let entry = self.keys.get(&key).and_then(|serial| self.entries.get(serial));
        entry.map_or(0, |entry| entry.preemptions)
    }

    pub(super) fn has_preempted(&self) -> bool {
        let preempted = |entry: &Entry| entry.count(ChoiceState::Preempted) > 0;
        self.entries.values().any(preempted)
    }
}

/// Blocks for everything a preempted sequence must compute again, less what the prefix cache still has.
fn take_blocks_again(sequence: &mut Sequence, pool: &mut BlockPool) -> bool {
    let found = sequence.take_prefix(pool);
    let rest = pool.blocks_for(sequence.len()) - found;
    match pool.allocate(rest, BlockUse::Active) {
        Some(blocks) => {
            sequence.table.extend(blocks);
            true
        }
        None => {
            sequence.release(pool);
            false
        }
    }
}
