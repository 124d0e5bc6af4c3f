//! Who runs when, and when threads that wait may go on. It knows nothing of what instructions do.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::fault::Fault;
use crate::instruction::Op;
use crate::machine::Machine;
use crate::machine::thread::{State, Thread};

pub(super) const WARP_LANES: usize = 32;

impl Machine<'_> {
    /// Runs the block until all threads have ended.
    pub(super) fn run_block(&mut self) -> Result<(), Fault> {
        let threads = self.threads.len();
        let mut warps: Vec<usize> = (0..threads.div_ceil(WARP_LANES)).collect();
        loop {
            self.order.shuffle(&mut warps);
            let mut has_moved = false;
            for &warp in &warps {
                let first = warp * WARP_LANES;
                has_moved |= self.run_warp(first..threads.min(first + WARP_LANES))?;
            }
            if self.release_barrier()? {
                continue;
            }
            if self.threads.iter().all(|thread| thread.state == State::Ended) {
                self.report_copies_left();
                return Ok(());
            }
            if !has_moved {
                return Err(self.nobody_moves());
            }
        }
    }

    /// Runs a warp's threads and their warp operations for a while. False: none could go on.
    fn run_warp(&mut self, lanes: Range<usize>) -> Result<bool, Fault> {
        let mut has_moved = false;
        for _ in 0..self.order.rounds() {
            has_moved |= self.run_ready_lanes(lanes.clone())?;
            if !self.run_warp_operations(&lanes)? {
                break;
            }
            has_moved = true;
        }
        Ok(has_moved)
    }

    fn run_ready_lanes(&mut self, lanes: Range<usize>) -> Result<bool, Fault> {
        let mut places = [0; WARP_LANES];
        let places = &mut places[..lanes.len()];
        for (place, lane) in places.iter_mut().zip(lanes) {
            *place = lane;
        }
        self.order.shuffle(places);
        let mut has_moved = false;
        for &mut thread in places {
            if self.threads[thread].state == State::Ready {
                self.run_thread(thread)?;
                has_moved = true;
            }
        }
        Ok(has_moved)
    }

    /// Runs each warp operation whose lanes are all there.
    fn run_warp_operations(&mut self, lanes: &Range<usize>) -> Result<bool, Fault> {
        let mut has_run = false;
        for leader in lanes.clone() {
            let State::InWarp { mask } = self.threads[leader].state else {
                continue;
            };
            if let Some(members) = self.members(lanes, leader, mask)? {
                self.run_warp_operation(lanes.start, members)?;
                for lane in lanes.clone().filter(|lane| (members >> (lane - lanes.start)) & 1 != 0) {
                    self.threads[lane].state = State::Ready;
                    self.threads[lane].pc += 1;
                }
                has_run = true;
            }
        }
        Ok(has_run)
    }

    /// The lanes of a warp operation as bits, once all of them wait there. Lanes that have ended are left out.
    fn members(&self, lanes: &Range<usize>, leader: usize, mask: u32) -> Result<Option<u32>, Fault> {
        let pc = self.threads[leader].pc;
        let mut members = 0;
        for bit in (0..WARP_LANES as u32).filter(|bit| (mask >> bit) & 1 != 0) {
            let lane = lanes.start + bit as usize;
            match self.threads.get(lane).filter(|_| lane < lanes.end) {
                Some(thread) if thread.state == (State::InWarp { mask }) && thread.pc == pc => members |= 1 << bit,
                Some(thread) if thread.state != State::Ended => return Ok(None),
                _ if self.needs_all_lanes(pc) => {
                    let what = format!("lane {bit} has ended or does not exist, and this instruction needs all 32");
                    return Err(Fault::Divergence {
                        place: self.place(leader, self.line_at(leader)),
                        what,
                    });
                }
                _ => {}
            }
        }
        Ok(Some(members))
    }

    fn needs_all_lanes(&self, pc: usize) -> bool {
        matches!(&self.kernel.code[pc].op, Op::Warp(operation) if operation.mask.is_none())
    }

    /// Lets all threads pass the barrier, if all have reached it.
    fn release_barrier(&mut self) -> Result<bool, Fault> {
        let count = |state: State| self.threads.iter().filter(|thread| thread.state == state).count();
        let (waiting, ended) = (count(State::AtBarrier), count(State::Ended));
        if waiting == 0 || waiting + ended < self.threads.len() {
            return Ok(false);
        }
        if ended > 0 {
            return Err(self.diverged(format!(
                "{ended} threads have ended, and the others wait for them at a barrier"
            )));
        }
        let is_divided = |warp: &[Thread]| warp.iter().any(|thread| thread.pc != warp[0].pc);
        if self.threads.chunks(WARP_LANES).any(is_divided) {
            return Err(self.diverged("threads of one warp wait at different barriers".to_owned()));
        }
        let epoch = 1 + self.threads.iter().map(|thread| thread.warp_epoch).max().unwrap_or(0);
        for thread in &mut self.threads {
            thread.state = State::Ready;
            thread.pc += 1;
            thread.block_epoch += 1;
            thread.warp_epoch = epoch;
        }
        Ok(true)
    }

    /// Why no thread of the block can go on.
    fn nobody_moves(&self) -> Fault {
        let is_in_warp = |thread: &&Thread| matches!(thread.state, State::InWarp { .. });
        let is_divided = |warp: &[Thread]| {
            let mut places = warp.iter().filter(is_in_warp).map(|thread| thread.pc);
            let first = places.next();
            places.any(|place| Some(place) != first)
        };
        if self.threads.chunks(WARP_LANES).any(is_divided) {
            return self.diverged("lanes of one warp wait for each other at different instructions".to_owned());
        }
        let place = self.first_waiting();
        Fault::Deadlock {
            place: self.place(place, self.line_at(place)),
            what: self.who_waits(),
        }
    }

    fn diverged(&self, why: String) -> Fault {
        let place = self.first_waiting();
        let what = format!("{why}: {}", self.who_waits());
        Fault::Divergence {
            place: self.place(place, self.line_at(place)),
            what,
        }
    }

    fn first_waiting(&self) -> usize {
        self.threads
            .iter()
            .position(|thread| thread.state != State::Ended)
            .unwrap_or(0)
    }

    /// The line where a thread is.
    pub(super) fn line_at(&self, thread: usize) -> u32 {
        self.kernel
            .code
            .get(self.threads[thread].pc)
            .map_or(0, |instruction| instruction.line)
    }

    /// The threads by line and by what they wait for.
    fn who_waits(&self) -> String {
        let mut groups: BTreeMap<(u32, String), (usize, usize)> = BTreeMap::new();
        for (number, thread) in self.threads.iter().enumerate() {
            let waits = match thread.state {
                State::Ready => "are ready".to_owned(),
                State::AtBarrier => "wait at a barrier".to_owned(),
                State::InWarp { mask } => format!("wait for the lanes {mask:#010x}"),
                State::Ended => "have ended".to_owned(),
            };
            groups.entry((self.line_at(number), waits)).or_insert((number, 0)).1 += 1;
        }
        let words = groups.into_iter().map(|((line, waits), (first, count))| {
            format!("{count} threads, the first is {first}, {waits} at line {line}")
        });
        words.collect::<Vec<_>>().join("; ")
    }
}
