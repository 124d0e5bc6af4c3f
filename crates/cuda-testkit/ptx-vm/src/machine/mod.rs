//! A launch: its blocks one after the other, in an order that the seed chooses.
//!
//! A thread runs until it needs others (a warp operation, a barrier) or ends. Each thread has its own program counter, so a
//! branch needs nobody else. `schedule.rs` says who runs when.

mod access;
mod copies;
mod matrices;
mod order;
mod schedule;
mod step;
mod thread;
mod warp;

use crate::fault::{Fault, Place};
use crate::findings::{FindingKind, Findings};
use crate::memory::Memory;
use crate::ptx::Kernel;
use crate::shadow::Cell;

use order::Order;
use thread::Thread;

/// CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
const THREADS_MAX: u32 = 1024;
/// The same place, compute capability 9.0: 227 KiB for a block.
const SHARED_BYTES_MAX: usize = 232_448;
/// A launch of more blocks is refused: it would not end in a test's time.
const BLOCKS_MAX: u64 = 1 << 22;

/// The bits of memory and registers that nobody has written: NaN in every format.
const NO_VALUE: u8 = 0xff;

/// What a launch runs, and on what.
#[derive(Clone, Copy, Debug)]
pub struct Launch<'a> {
    pub kernel: &'a Kernel,
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub dynamic_shared_bytes: usize,
    /// `kernel.param_bytes` bytes: each parameter's value at its offset.
    pub params: &'a [u8],
    /// Chooses the order of blocks, warps and lanes. 0: as they are numbered.
    pub seed: u64,
    /// Thread instructions. A launch that needs more is a fault.
    pub steps_max: u64,
}

impl Launch<'_> {
    fn invalid(&self, what: String) -> Fault {
        Fault::InvalidLaunch {
            kernel: self.kernel.name.clone(),
            line: self.kernel.line,
            what,
        }
    }

    fn shared_bytes(&self) -> usize {
        match self.dynamic_shared_bytes {
            0 => self.kernel.static_shared_bytes,
            dynamic => self.kernel.dynamic_shared_at.saturating_add(dynamic),
        }
    }

    /// The number of blocks and of threads in each.
    fn check(&self) -> Result<(u32, usize), Fault> {
        let size = |shape: [u32; 3]| {
            shape
                .into_iter()
                .try_fold(1_u64, |size, side| size.checked_mul(u64::from(side)))
        };
        let (grid, block) = (self.grid, self.block);
        let blocks = size(grid).filter(|blocks| (1..=BLOCKS_MAX).contains(blocks));
        let blocks = blocks.ok_or_else(|| self.invalid(format!("a grid of {grid:?}, at most {BLOCKS_MAX} blocks")))?;
        let threads_max = self.kernel.max_threads.unwrap_or(THREADS_MAX).min(THREADS_MAX);
        let threads = size(block).filter(|threads| (1..=u64::from(threads_max)).contains(threads));
        let threads =
            threads.ok_or_else(|| self.invalid(format!("a block of {block:?}, at most {threads_max} threads")))?;
        if let Some(required) = self.kernel.required_block.filter(|required| *required != block) {
            return Err(self.invalid(format!("a block of {block:?}, and the kernel requires {required:?}")));
        }
        if self.shared_bytes() > SHARED_BYTES_MAX {
            return Err(self.invalid(format!(
                "{} bytes of shared memory, at most {SHARED_BYTES_MAX}",
                self.shared_bytes()
            )));
        }
        if self.params.len() != self.kernel.param_bytes {
            let (given, needed) = (self.params.len(), self.kernel.param_bytes);
            return Err(self.invalid(format!("{given} bytes of parameters, and the kernel has {needed}")));
        }
        Ok((blocks as u32, threads as usize))
    }
}

/// Runs a launch to its end, and gives the number of thread instructions. `memory` has begun the operation.
///
/// # Errors
/// What would end the context on a GPU, or what the interpreter does not do. Blocks that ran before it stay run.
pub fn run(launch: &Launch<'_>, memory: &mut Memory, findings: &mut Findings) -> Result<u64, Fault> {
    let (blocks, threads) = launch.check()?;
    findings.set_kernel(&launch.kernel.name);
    let mut order = Order::of_seed(launch.seed);
    let mut numbers: Vec<u32> = (0..blocks).collect();
    order.shuffle(&mut numbers);
    let mut machine = Machine::new(launch, threads, (memory, findings), order);
    for number in numbers {
        machine.begin_block(number);
        machine.run_block()?;
    }
    Ok(machine.steps)
}

/// One block, and what its threads share. It is used for all blocks of a launch in turn.
struct Machine<'a> {
    launch: &'a Launch<'a>,
    kernel: &'a Kernel,
    memory: &'a mut Memory,
    findings: &'a mut Findings,
    order: Order,
    /// The number of the block, and its place in the grid.
    block: u32,
    block_at: [u32; 3],
    threads: Vec<Thread>,
    /// Thread by thread.
    registers: Vec<u64>,
    shared: Vec<u8>,
    shared_cells: Vec<Cell>,
    /// Thread by thread.
    local: Vec<u8>,
    local_has_value: Vec<bool>,
    steps: u64,
}

impl<'a> Machine<'a> {
    fn new(
        launch: &'a Launch<'a>,
        threads: usize,
        (memory, findings): (&'a mut Memory, &'a mut Findings),
        order: Order,
    ) -> Self {
        let kernel = launch.kernel;
        let (shared_bytes, local_bytes) = (launch.shared_bytes(), threads * kernel.local_bytes);
        Self {
            launch,
            kernel,
            memory,
            findings,
            order,
            block: 0,
            block_at: [0; 3],
            threads: (0..threads)
                .map(|number| Thread::new(number as u32, launch.block))
                .collect(),
            registers: vec![u64::MAX; threads * kernel.registers],
            shared: vec![NO_VALUE; shared_bytes],
            shared_cells: vec![Cell::default(); shared_bytes.div_ceil(2)],
            local: vec![NO_VALUE; local_bytes],
            local_has_value: vec![false; local_bytes],
            steps: 0,
        }
    }

    fn begin_block(&mut self, number: u32) {
        let [x, y, _] = self.launch.grid;
        self.block = number;
        self.block_at = [number % x, number / x % y, number / x / y];
        self.registers.fill(u64::MAX);
        self.shared.fill(NO_VALUE);
        self.shared_cells.fill(Cell::default());
        self.local.fill(NO_VALUE);
        self.local_has_value.fill(false);
        for thread in &mut self.threads {
            thread.begin();
        }
    }

    fn place(&self, thread: usize, line: u32) -> Place {
        Place {
            kernel: self.kernel.name.clone(),
            line,
            block: self.block_at,
            thread: thread as u32,
        }
    }

    fn unsupported(&self, thread: usize, line: u32, what: &str) -> Fault {
        Fault::Unsupported {
            place: self.place(thread, line),
            what: what.to_owned(),
        }
    }

    /// Copies that no thread has waited for have no effect that the kernel could rely on.
    fn report_copies_left(&mut self) {
        for (number, thread) in self.threads.iter_mut().enumerate() {
            for copy in thread.copies.drain(..) {
                let first = || format!("block {} thread {number}", self.block);
                self.findings.add(FindingKind::AsyncCopyNotAwaited, copy.line, 0, first);
            }
        }
    }
}
