//! `cp.async`: a copy lands as late as its wait allows. Until then its target holds NaN, and a read of it is a finding.

use std::ptr;

use crate::fault::Fault;
use crate::instruction::{CopyAsync, Space};
use crate::machine::access::Use;
use crate::machine::thread::PendingCopy;
use crate::machine::{Machine, NO_VALUE};
use crate::shadow::{Judge, Usage};

impl Machine<'_> {
    pub(super) fn issue_copy(&mut self, thread: usize, copy: &CopyAsync, line: u32) -> Result<(), Fault> {
        let bytes = copy.bytes;
        let real_bytes = self.get(thread, copy.real_bytes) as usize;
        if real_bytes > bytes {
            return Err(self.unsupported(thread, line, "a cp.async whose source is larger than its target"));
        }
        let (at, from) = (self.address(thread, copy.to), self.address(thread, copy.from));
        let source = Use {
            space: Space::Global,
            at: from,
            bytes,
            usage: Usage::Read,
            line,
        };
        let target = Use {
            space: Space::Shared,
            at,
            bytes,
            usage: Usage::CopyIssued,
            line,
        };
        self.check_alignment(thread, &source)?;
        self.check_alignment(thread, &target)?;
        if real_bytes > 0 {
            let me = self.stamp(thread, line);
            let found = self
                .memory
                .use_bytes((from, real_bytes), me, Usage::Read, self.findings);
            found.ok_or_else(|| self.illegal(thread, (Space::Global, from, real_bytes), line))?;
        }
        let to = self.use_shared(thread, &target)?;
        self.shared[to..to + bytes].fill(NO_VALUE);
        let group = self.threads[thread].groups;
        self.threads[thread].copies.push_back(PendingCopy {
            to,
            from,
            bytes,
            real_bytes,
            group,
            line,
        });
        Ok(())
    }

    /// Lands all copies but those of the last groups, and of the group that is still open.
    pub(super) fn land_copies(&mut self, thread: usize, pending_max: u32) {
        let landed = self.threads[thread].groups.saturating_sub(pending_max);
        while let Some(copy) = self.threads[thread]
            .copies
            .front()
            .copied()
            .filter(|copy| copy.group < landed)
        {
            self.threads[thread].copies.pop_front();
            let target = &mut self.shared[copy.to..copy.to + copy.bytes];
            let (real, rest) = target.split_at_mut(copy.real_bytes);
            // SAFETY: `issue_copy` has found the source within one region, which its owner keeps while the kernel runs.
            unsafe {
                ptr::copy_nonoverlapping(
                    ptr::with_exposed_provenance(copy.from as usize),
                    real.as_mut_ptr(),
                    copy.real_bytes,
                );
            }
            rest.fill(0);
            let me = self.stamp(thread, copy.line);
            let judge = Judge {
                me,
                usage: Usage::CopyLanded,
                is_shared: true,
                ended_before: &[],
                base: 0,
            };
            judge.use_cells(&mut self.shared_cells, copy.to..copy.to + copy.bytes, self.findings);
        }
    }
}
