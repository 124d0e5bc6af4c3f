//! One thread, instruction by instruction, until it has to wait.

use crate::fault::Fault;
use crate::instruction::{CompareAnd, Instruction, Op, Predicate, Source, Special, WarpOp};
use crate::machine::Machine;
use crate::machine::schedule::WARP_LANES;
use crate::machine::thread::State;
use crate::types::low_bits;
use crate::windows;

/// What follows an instruction.
enum Flow {
    Next,
    To(usize),
    Wait(State),
}

impl Machine<'_> {
    pub(super) fn run_thread(&mut self, thread: usize) -> Result<(), Fault> {
        let kernel = self.kernel;
        let mut pc = self.threads[thread].pc;
        loop {
            let instruction = &kernel.code[pc];
            self.steps += 1;
            if self.steps > self.launch.steps_max {
                let place = self.place(thread, instruction.line);
                return Err(Fault::StepLimit {
                    place,
                    steps_max: self.launch.steps_max,
                });
            }
            if let Some((predicate, runs_if)) = instruction.guard
                && (self.get(thread, Source::Register(predicate)) != 0) != runs_if
            {
                pc += 1;
                continue;
            }
            match self.execute(thread, instruction)? {
                Flow::Next => pc += 1,
                Flow::To(target) => pc = target,
                Flow::Wait(state) => {
                    let thread = &mut self.threads[thread];
                    (thread.pc, thread.state) = (pc, state);
                    return Ok(());
                }
            }
        }
    }

    fn execute(&mut self, thread: usize, instruction: &Instruction) -> Result<Flow, Fault> {
        let line = instruction.line;
        match &instruction.op {
            Op::Compute { f, to, from: [a, b, c] } => {
                let value = f(self.get(thread, *a), self.get(thread, *b), self.get(thread, *c));
                self.set(thread, *to, value);
            }
            Op::Compare { f, to, from: [a, b] } => {
                let value = f(self.get(thread, *a), self.get(thread, *b));
                self.set(thread, *to, u64::from(value));
            }
            Op::Branch { to } => return Ok(Flow::To(*to)),
            Op::Load(load) => self.load(thread, load, line)?,
            Op::Store(store) => self.store(thread, store, line)?,
            Op::Convert { to, from, conversion } => {
                let value = conversion.apply(self.get(thread, *from));
                self.set(thread, to.register, value & to.ty.mask());
            }
            Op::Pack { to, from, part_bits } => {
                let parts = from
                    .iter()
                    .rev()
                    .map(|part| self.get(thread, *part) & low_bits(*part_bits));
                let value = parts.fold(0, |value, part| value << part_bits | part);
                self.set(thread, *to, value);
            }
            Op::Unpack { to, from, part_bits } => {
                let mut value = self.get(thread, *from);
                for register in to.iter() {
                    self.set(thread, *register, value & low_bits(*part_bits));
                    value >>= part_bits;
                }
            }
            Op::Warp(operation) => return self.wait_for_lanes(thread, operation, line),
            Op::Barrier => return Ok(Flow::Wait(State::AtBarrier)),
            Op::Exit => return Ok(Flow::Wait(State::Ended)),
            other => return self.execute_rare(thread, other, line),
        }
        Ok(Flow::Next)
    }

    /// What loops seldom have, apart from the rest, so that the common case stays small.
    fn execute_rare(&mut self, thread: usize, op: &Op, line: u32) -> Result<Flow, Fault> {
        match op {
            Op::Compute4 { f, to, from } => {
                let sources: [Source; 4] = **from;
                let value = f(sources.map(|source| self.get(thread, source)));
                self.set(thread, *to, value);
            }
            Op::Carry(carry) => {
                let flag = if carry.reads_carry {
                    self.get(thread, Source::Register(self.kernel.carry))
                } else {
                    0
                };
                let [a, b] = carry.from.map(|source| self.get(thread, source));
                let (value, flag) = (carry.f)(a, b, flag & 1);
                self.set(thread, carry.to, value);
                if carry.writes_carry {
                    self.set(thread, self.kernel.carry, flag);
                }
            }
            Op::CompareAnd(compare) => self.compare_and(thread, compare),
            Op::FromGeneric { to, from, window } => {
                let address = self.get(thread, *from);
                let offset = windows::offset_in(*window, address);
                let space = windows::resolve(*window).0;
                let offset = offset.ok_or_else(|| self.illegal(thread, (space, address, 0), line))?;
                self.set(thread, *to, offset);
            }
            Op::Atomic(atomic) => self.atomic(thread, atomic, line)?,
            Op::CopyAsync(copy) => self.issue_copy(thread, copy, line)?,
            Op::CommitCopies => self.threads[thread].groups += 1,
            Op::WaitForCopies { pending_max } => self.land_copies(thread, *pending_max),
            Op::WaitForAllCopies => {
                self.threads[thread].groups += 1;
                self.land_copies(thread, 0);
            }
            Op::BranchTable { index, to } => {
                let index = self.get(thread, *index);
                let target = usize::try_from(index).ok().and_then(|index| to.get(index));
                let what = "a branch with an index that has no label";
                return target
                    .map(|target| Flow::To(*target))
                    .ok_or_else(|| self.unsupported(thread, line, what));
            }
            Op::Trap => {
                return Err(Fault::Trap {
                    place: self.place(thread, line),
                });
            }
            // A fence. All others are in `execute`.
            _ => {}
        }
        Ok(Flow::Next)
    }

    fn compare_and(&mut self, thread: usize, compare: &CompareAnd) {
        let [a, b] = compare.from.map(|source| self.get(thread, source));
        let holds = (compare.f)(a, b);
        let combined = |machine: &Self, holds: bool| match &compare.combine {
            Some((combine, with)) => combine(holds, machine.holds(thread, with)),
            None => holds,
        };
        let (value, opposite) = (combined(&*self, holds), combined(&*self, !holds));
        self.set(thread, compare.to, if value { compare.truth } else { 0 });
        if let Some(to) = compare.to_opposite {
            self.set(thread, to, u64::from(opposite));
        }
    }

    fn wait_for_lanes(&self, thread: usize, operation: &WarpOp, line: u32) -> Result<Flow, Fault> {
        let lane = thread % WARP_LANES;
        let mask = operation.mask.map_or(u32::MAX, |mask| self.get(thread, mask) as u32);
        if (mask >> lane) & 1 == 0 {
            let what = format!("lane {lane} is not in its own mask {mask:#010x}");
            return Err(Fault::Divergence {
                place: self.place(thread, line),
                what,
            });
        }
        Ok(Flow::Wait(State::InWarp { mask }))
    }

    #[inline(always)]
    pub(super) fn get(&self, thread: usize, source: Source) -> u64 {
        match source {
            Source::Register(register) => self.registers[thread * self.kernel.registers + register as usize],
            Source::Constant(value) => value,
            Source::Special(special) => u64::from(self.special(thread, special)),
        }
    }

    #[inline(always)]
    pub(super) fn set(&mut self, thread: usize, register: u32, value: u64) {
        self.registers[thread * self.kernel.registers + register as usize] = value;
    }

    pub(super) fn holds(&self, thread: usize, predicate: &Predicate) -> bool {
        (self.get(thread, predicate.from) != 0) != predicate.is_negated
    }

    fn special(&self, thread: usize, special: Special) -> u32 {
        let lane = (thread % WARP_LANES) as u32;
        match special {
            Special::Thread(dimension) => self.threads[thread].at[usize::from(dimension)],
            Special::Threads(dimension) => self.launch.block[usize::from(dimension)],
            Special::Block(dimension) => self.block_at[usize::from(dimension)],
            Special::Blocks(dimension) => self.launch.grid[usize::from(dimension)],
            Special::Lane => lane,
            Special::Warp => (thread / WARP_LANES) as u32,
            Special::Warps => self.threads.len().div_ceil(WARP_LANES) as u32,
            // A device of one multiprocessor.
            Special::Multiprocessor => 0,
            Special::LanesEqual => 1 << lane,
            Special::LanesBelow => (1 << lane) - 1,
            Special::LanesUpTo => u32::MAX >> (31 - lane),
            Special::LanesAbove => !(u32::MAX >> (31 - lane)),
            Special::LanesFrom => u32::MAX << lane,
            Special::DynamicSharedBytes => self.launch.dynamic_shared_bytes as u32,
        }
    }
}
