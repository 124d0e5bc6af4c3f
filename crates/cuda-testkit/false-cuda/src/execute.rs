//! Owns what work does when the device comes to it. An error here ends the context, as on a device.

use std::ffi::c_void;
use std::sync::atomic::Ordering;
use std::time::Instant;

use ptx_vm::{Access, Fault, Launch};

use crate::codes::{Answer, Code};
use crate::objects::{DONE, FREED, Origin};
use crate::state::State;
use crate::work::{Copy, Fill, KernelLaunch, Side, Work};

/// The error of a context that a kernel has ended.
fn code_of(fault: &Fault) -> Code {
    match fault {
        Fault::IllegalAddress { .. } => Code::ILLEGAL_ADDRESS,
        Fault::Misaligned { .. } => Code::MISALIGNED_ADDRESS,
        Fault::Deadlock { .. } | Fault::StepLimit { .. } => Code::LAUNCH_TIMEOUT,
        Fault::Unsupported { .. } => Code::ILLEGAL_INSTRUCTION,
        _ => Code::LAUNCH_FAILED,
    }
}

impl State {
    pub(crate) fn execute(&mut self, device: usize, work: &Work) -> Answer {
        if self.has_file(|settings| settings.lost.as_deref()) {
            self.faults
                .push("the device is lost, as FALSE_CUDA_LOST says".to_owned());
            return Err(Code::LAUNCH_FAILED);
        }
        match work {
            Work::Nothing | Work::AwaitProcess { .. } => Ok(()),
            Work::Copy(copy) => self.copy(copy),
            Work::Fill(fill) => self.fill(*fill),
            Work::Launch(launch) => self.launch(device, launch),
            Work::Free(at) => self.free_in_order(*at),
            Work::Record { event, ticket, page } => {
                if let Some(event) = self.events.get_mut(event) {
                    event.finished = Some((*ticket, Instant::now()));
                }
                if let Some(page) = page {
                    page.word(DONE).fetch_max(*ticket, Ordering::SeqCst);
                }
                Ok(())
            }
            Work::HostFunction { function, data } => {
                // SAFETY: who gave the function promised that it takes this data. It runs once for each time it was given.
                unsafe { function(*data as *mut c_void) };
                Ok(())
            }
            Work::Outside(outside) => {
                self.findings.set_kernel(&outside.name);
                outside
                    .accesses
                    .iter()
                    .filter(|access| access.bytes > 0)
                    .try_for_each(|access| {
                        let how = if access.is_write == 0 {
                            Access::Read
                        } else {
                            Access::Write
                        };
                        self.use_range(access.at, access.bytes, how)
                    })
            }
        }
    }

    /// One access of a whole range. Memory that was freed since the work was given is an illegal address.
    fn use_range(&mut self, at: u64, bytes: usize, access: Access) -> Answer {
        let Some((start, memory)) = self.allocation_of(at, bytes) else {
            let state = if self.space.has(at) {
                "they are freed or outside"
            } else {
                "they are no device memory"
            };
            self.faults
                .push(format!("{bytes} bytes at {at:#x} cannot be used: {state}"));
            return Err(Code::ILLEGAL_ADDRESS);
        };
        let device = memory.device;
        if let Origin::Imported { page, .. } = &memory.origin
            && page.word(FREED).load(Ordering::SeqCst) != 0
        {
            self.misuse(format!(
                "imported memory at {start:#x} is used after its owner has freed it"
            ));
        }
        let memory = &mut self.devices[device].memory;
        memory.touch(at, bytes, access, &mut self.findings);
        Ok(())
    }

    fn copy(&mut self, copy: &Copy) -> Answer {
        let Copy { to, from, bytes } = copy;
        self.findings.set_kernel("copy");
        if let Side::Device(at) = from {
            self.use_range(*at, *bytes, Access::Read)?;
        }
        if let Side::Device(at) = to {
            self.use_range(*at, *bytes, Access::Write)?;
        }
        let source = match from {
            Side::Device(at) | Side::Host(at) => *at as *const u8,
            Side::Staged(staged) => staged.as_ptr(),
        };
        let (Side::Device(target) | Side::Host(target)) = to else {
            return Ok(());
        };
        self.space.open();
        // SAFETY: device ranges are allocated (`use_range`) and open, staged bytes are as many as the copy's (`copies.rs`), and
        // who asked for the copy keeps host ranges until it is over. The ranges may overlap.
        unsafe { std::ptr::copy(source, *target as *mut u8, *bytes) };
        Ok(())
    }

    fn fill(&mut self, fill: Fill) -> Answer {
        let Fill {
            at,
            value,
            width,
            count,
        } = fill;
        self.findings.set_kernel("fill");
        self.use_range(at, width * count, Access::Write)?;
        self.space.open();
        // SAFETY: `use_range` has found so many bytes at the address, and they are open. Nothing else uses them now.
        let target = unsafe { std::slice::from_raw_parts_mut(at as *mut u8, width * count) };
        let value = value.to_le_bytes();
        for part in target.chunks_exact_mut(width) {
            part.copy_from_slice(&value[..width]);
        }
        Ok(())
    }

    fn launch(&mut self, device: usize, launch: &KernelLaunch) -> Answer {
        let steps_max = self.settings.as_ref().map_or(0, |settings| settings.steps_max);
        self.findings.set_kernel(&launch.kernel.name);
        self.space.open();
        self.launches += 1;
        let run = Launch {
            kernel: &launch.kernel,
            grid: launch.grid,
            block: launch.block,
            dynamic_shared_bytes: launch.dynamic_shared_bytes,
            params: &launch.params,
            seed: self.random.draw(),
            steps_max,
        };
        match ptx_vm::run(&run, &mut self.devices[device].memory, &mut self.findings) {
            Ok(thread_instructions) => {
                self.thread_instructions += thread_instructions;
                Ok(())
            }
            Err(fault) => {
                self.faults.push(fault.to_string());
                Err(code_of(&fault))
            }
        }
    }

    /// The free is a write of the whole range, so a use that it is not ordered behind is a race.
    fn free_in_order(&mut self, at: u64) -> Answer {
        self.findings.set_kernel("cuMemFreeAsync");
        let Some(bytes) = self.allocations.get(&at).map(|memory| memory.bytes) else {
            self.misuse(format!("memory at {at:#x} is freed twice"));
            return Ok(());
        };
        self.use_range(at, bytes, Access::Write)?;
        self.release(at);
        Ok(())
    }
}
