//! Operations of the lanes of a warp. Only `bar.warp.sync` orders memory: PTX does not say that the others do.

use crate::fault::Fault;
use crate::instruction::{Compute, Op, Shuffle, Source, Vote, WarpAction};
use crate::machine::Machine;
use crate::machine::schedule::WARP_LANES;

/// The lanes that take part, by number in the block.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lanes {
    /// The thread of lane 0.
    pub(super) first: usize,
    members: u32,
}

impl Lanes {
    fn has(self, lane: usize) -> bool {
        (self.members >> lane) & 1 != 0
    }

    fn threads(self) -> impl Iterator<Item = usize> {
        (0..WARP_LANES)
            .filter(move |lane| self.has(*lane))
            .map(move |lane| self.first + lane)
    }
}

/// The operands of `shfl`.
struct Exchange {
    mode: Shuffle,
    value: Source,
    lane: Source,
    clamp: Source,
    to: u32,
    in_range: Option<u32>,
}

impl Machine<'_> {
    /// Does what the members wait for. All of them are at the same instruction.
    pub(super) fn run_warp_operation(&mut self, first: usize, members: u32) -> Result<(), Fault> {
        let lanes = Lanes { first, members };
        let kernel = self.kernel;
        let Some(leader) = lanes.threads().next() else {
            return Ok(());
        };
        let instruction = &kernel.code[self.threads[leader].pc];
        let Op::Warp(operation) = &instruction.op else {
            return Ok(());
        };
        match &operation.action {
            WarpAction::Sync => self.sync_warp(lanes),
            &WarpAction::Shuffle {
                mode,
                to,
                in_range,
                value,
                lane,
                clamp,
            } => {
                let exchange = Exchange {
                    mode,
                    value,
                    lane,
                    clamp,
                    to,
                    in_range,
                };
                return self.shuffle(lanes, &exchange, instruction.line);
            }
            WarpAction::Vote { mode, to, predicate } => {
                let holds = |thread: usize| self.holds(thread, predicate);
                let count = lanes.threads().filter(|thread| holds(*thread)).count();
                let (all, any) = (count == members.count_ones() as usize, count > 0);
                let value = match mode {
                    Vote::All => u32::from(all),
                    Vote::Any => u32::from(any),
                    Vote::Uniform => u32::from(all || !any),
                    Vote::Ballot => lanes
                        .threads()
                        .filter(|thread| holds(*thread))
                        .fold(0, |ballot, thread| ballot | 1 << (thread - first)),
                };
                self.set_all(lanes, *to, u64::from(value));
            }
            WarpAction::Reduce { f, to, value } => {
                let result = self.reduce(lanes, *f, *value);
                self.set_all(lanes, *to, result);
            }
            WarpAction::LoadMatrices {
                to,
                address,
                is_transposed,
            } => {
                return self.load_matrices(lanes, (to.as_slice(), *address, *is_transposed), instruction.line);
            }
            WarpAction::Multiply(multiply) => self.multiply(lanes, multiply),
        }
        Ok(())
    }

    fn set_all(&mut self, lanes: Lanes, to: u32, value: u64) {
        for thread in lanes.threads() {
            self.set(thread, to, value);
        }
    }

    /// For a part of a warp the epoch orders more than it should: it also counts as after what lanes outside did before. So a
    /// race with a lane that is not in the mask may stay unseen.
    fn sync_warp(&mut self, lanes: Lanes) {
        let epoch = lanes
            .threads()
            .map(|thread| self.threads[thread].warp_epoch)
            .max()
            .unwrap_or(0);
        for thread in lanes.threads() {
            self.threads[thread].warp_epoch = epoch + 1;
        }
    }

    fn reduce(&self, lanes: Lanes, f: Compute, value: Source) -> u64 {
        let values = lanes.threads().map(|thread| self.get(thread, value));
        values.reduce(|a, b| f(a, b, 0)).unwrap_or(0)
    }

    /// PTX ISA, "shfl.sync": the clamp operand has the bound of the lane in its low 5 bits, and the mask of segments above.
    fn shuffle(&mut self, lanes: Lanes, exchange: &Exchange, line: u32) -> Result<(), Fault> {
        let mut values = [0; WARP_LANES];
        for thread in lanes.threads() {
            values[thread - lanes.first] = self.get(thread, exchange.value);
        }
        for thread in lanes.threads() {
            let lane = thread - lanes.first;
            let by = self.get(thread, exchange.lane) as usize & 31;
            let clamp = self.get(thread, exchange.clamp) as usize;
            let (bound, segment) = (clamp & 31, (clamp >> 8) & 31);
            let lane_max = (lane & segment) | (bound & !segment);
            let (from, is_in_range) = match exchange.mode {
                // A lane below 0 is out of range.
                Shuffle::Up => (lane.wrapping_sub(by), lane >= by && lane - by >= lane_max),
                Shuffle::Down => (lane + by, lane + by <= lane_max),
                Shuffle::Xor => (lane ^ by, (lane ^ by) <= lane_max),
                Shuffle::Index => {
                    let from = (lane & segment) | (by & !segment);
                    (from, from <= lane_max)
                }
            };
            let from = if is_in_range { from } else { lane };
            if !lanes.has(from) {
                let what = format!("lane {lane} reads from lane {from}, which is not in the mask or has ended");
                return Err(Fault::Divergence {
                    place: self.place(thread, line),
                    what,
                });
            }
            self.set(thread, exchange.to, values[from]);
            if let Some(predicate) = exchange.in_range {
                self.set(thread, predicate, u64::from(is_in_range));
            }
        }
        Ok(())
    }
}
