//! Owns when work runs: a stream's work in its order, behind what it waits for, the legacy stream's rules, and otherwise in an order
//! that the seed chooses. It never decides what work does.
//!
//! Work is late: most of it runs when the host waits, some when the host gives other work (one call of four, by the seed), all of
//! it when the host does nothing for a while. Findings do not depend on that: the clock of an operation says what is known to be
//! over before it, in every schedule.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use ptx_vm::FindingKind;

use crate::codes::{Answer, Code};
use crate::objects::{CaptureState, DONE, Operation, Stream, Watched};
use crate::order::{Clock, Mark, Point};
use crate::state::State;
use crate::work::{Poll, Side, Work};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    Done,
    /// Something else has to happen first.
    Blocked,
}

/// Of host memory. It only has to tell that bytes have changed.
fn hash_at(at: u64, bytes: usize) -> u64 {
    // SAFETY: the range is a source that the host gave to a copy and has to keep until it is over.
    let source = unsafe { std::slice::from_raw_parts(at as *const u8, bytes) };
    let mix = |hash: u64, word: u64| (hash ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
    let chunks = source.chunks_exact(8);
    let tail = chunks
        .remainder()
        .iter()
        .fold(bytes as u64, |hash, byte| mix(hash, u64::from(*byte)));
    chunks.fold(tail, |hash, chunk| {
        mix(hash, chunk.try_into().map_or(0, u64::from_ne_bytes))
    })
}

impl State {
    pub(crate) fn is_lazy(&self) -> bool {
        self.settings.as_ref().is_ok_and(|settings| settings.seed == 0)
    }

    /// Gives work to a stream, or to the capture that the stream is in.
    pub(crate) fn submit(&mut self, stream: usize, work: Work) -> Answer {
        match self.streams[stream].capture {
            Some(capture) => self.capture_work(capture, stream, work),
            None => self.submit_after(stream, work, Vec::new()),
        }
    }

    /// The same, behind points of other streams, and never into a capture.
    pub(crate) fn submit_after(&mut self, stream: usize, work: Work, mut after: Vec<Mark>) -> Answer {
        self.refuse_implicit_capture(stream)?;
        after.extend(self.legacy_order(stream));
        let mut clock = self.host_clock().clone();
        clock.join(&self.streams[stream].last.clock);
        for mark in &after {
            clock.join(&mark.clock);
        }
        if matches!(work, Work::AwaitProcess { .. }) {
            clock.join(&self.told_to_processes(|_| true));
        }
        let point = Point {
            stream,
            number: self.streams[stream].last.point.number + 1,
        };
        clock.reach(point);
        if let Work::Copy(copy) = &work
            && let Side::Host(at) = copy.from
        {
            self.watched.push(Watched {
                point,
                at,
                bytes: copy.bytes,
                hash: hash_at(at, copy.bytes),
            });
        }
        let mark = Mark {
            point,
            clock: Arc::new(clock),
        };
        let after = after.iter().map(|mark| mark.point).collect();
        let to = &mut self.streams[stream];
        to.last = mark.clone();
        to.queue.push_back(Operation { mark, after, work });
        let device = to.device;
        if !self.is_lazy() && self.random.one_in(4) {
            self.run_some();
        }
        self.device_answer(device)
    }

    /// The legacy stream and the streams that were made without CU_STREAM_NON_BLOCKING wait for each other.
    pub(crate) fn legacy_order(&self, stream: usize) -> Vec<Mark> {
        let me = &self.streams[stream];
        let legacy = self.devices[me.device].default_stream;
        if stream == legacy {
            let others =
                |other: &&Stream| other.device == me.device && other.is_blocking && other.last.point.stream != legacy;
            return self
                .streams
                .iter()
                .filter(others)
                .map(|other| other.last.clone())
                .collect();
        }
        if me.is_blocking {
            vec![self.streams[legacy].last.clone()]
        } else {
            Vec::new()
        }
    }

    /// Work of the legacy stream would depend on a blocking stream that is captured.
    pub(crate) fn refuse_implicit_capture(&mut self, stream: usize) -> Answer {
        let device = self.streams[stream].device;
        if stream != self.devices[device].default_stream {
            return Ok(());
        }
        let streams = &self.streams;
        let is_blocking = |(stream, _): &(usize, Vec<usize>)| streams[*stream].is_blocking;
        let mut is_refused = false;
        for capture in self.captures.values_mut() {
            if capture.device == device && capture.lanes.iter().any(is_blocking) {
                capture.state = CaptureState::Invalidated;
                is_refused = true;
            }
        }
        if is_refused {
            Err(Code::STREAM_CAPTURE_IMPLICIT)
        } else {
            Ok(())
        }
    }

    pub(crate) fn is_done(&self, point: Point) -> bool {
        self.streams[point.stream].done >= point.number
    }

    pub(crate) fn has_work(&self) -> bool {
        self.streams.iter().any(|stream| !stream.queue.is_empty())
    }

    /// Runs one operation that may run, of a stream that the seed chooses.
    pub(crate) fn run_some(&mut self) -> Progress {
        let can_run = |stream: &Stream| {
            let front = stream.queue.front();
            front.is_some_and(|front| front.after.iter().all(|point| self.is_done(*point)))
        };
        let ready: Vec<usize> = (0..self.streams.len())
            .filter(|slot| can_run(&self.streams[*slot]))
            .collect();
        match self.random.pick(&ready) {
            Some(stream) => self.run_front(stream),
            None => Progress::Blocked,
        }
    }

    /// Runs what the marks need, and now and then something else.
    pub(crate) fn advance(&mut self, marks: &[Mark]) -> Progress {
        loop {
            let open = marks.iter().map(|mark| mark.point).find(|point| !self.is_done(*point));
            let Some(open) = open else { return Progress::Done };
            if !self.is_lazy() && self.random.one_in(3) {
                self.run_some();
                continue;
            }
            if self.run_towards(open) == Progress::Blocked {
                // What blocks may wait for work of another stream that nobody waits for here.
                self.run_some();
                return Progress::Blocked;
            }
        }
    }

    /// Runs the first operation that may run among those that a point waits for.
    fn run_towards(&mut self, point: Point) -> Progress {
        let mut stream = point.stream;
        // Every step goes to work that was given earlier, so it ends.
        while let Some(front) = self.streams[stream].queue.front() {
            match front.after.iter().find(|point| !self.is_done(**point)) {
                Some(open) => stream = open.stream,
                None => return self.run_front(stream),
            }
        }
        Progress::Blocked
    }

    fn run_front(&mut self, stream: usize) -> Progress {
        let Some(operation) = self.streams[stream].queue.pop_front() else {
            return Progress::Blocked;
        };
        let device = self.streams[stream].device;
        // After an error a device only drops its work.
        if self.devices[device].sticky.is_none() {
            match self.poll(&operation.work) {
                Poll::Runs => {
                    self.streams[stream].queue.push_front(operation);
                    return Progress::Blocked;
                }
                Poll::Ended => {
                    self.begin(&operation);
                    self.devices[device].sticky = self.execute(device, &operation.work).err();
                }
                Poll::GaveUp => {}
            }
        }
        self.streams[stream].done = operation.mark.point.number;
        Progress::Done
    }

    fn poll(&mut self, work: &Work) -> Poll {
        if self.has_file(|settings| settings.hang.as_deref()) {
            return Poll::Runs;
        }
        match work {
            Work::Outside(outside) => {
                self.space.open();
                outside.poll()
            }
            Work::AwaitProcess { page, ticket } if page.word(DONE).load(Ordering::SeqCst) < *ticket => Poll::Runs,
            _ => Poll::Ended,
        }
    }

    /// Tells the shadow memory which of the operations that used memory are known to be over.
    fn begin(&mut self, operation: &Operation) {
        if !operation.work.uses_memory() {
            return;
        }
        let clock = &operation.mark.clock;
        let ended: Vec<bool> = self.ran.iter().map(|point| clock.knows(*point)).collect();
        let number = u32::try_from(self.ran.len()).unwrap_or(u32::MAX);
        self.ran.push(operation.mark.point);
        for device in &mut self.devices {
            device.memory.begin_operation(number, ended.clone());
        }
    }

    /// The host has waited for this: it knows what is over, and may change the sources of the copies among it.
    pub(crate) fn learn(&mut self, clock: &Clock) {
        let host = self.host_clock();
        host.join(clock);
        let host = host.clone();
        let watched = std::mem::take(&mut self.watched);
        let (over, open): (Vec<_>, Vec<_>) = watched.into_iter().partition(|source| host.knows(source.point));
        self.watched = open;
        for source in over
            .iter()
            .filter(|source| hash_at(source.at, source.bytes) != source.hash)
        {
            self.findings.set_kernel("pinned memory");
            self.findings.add(FindingKind::PinnedSourceChanged, 0, 0, || {
                let Watched { at, bytes, point, .. } = source;
                format!(
                    "{bytes} bytes at {at:#x} changed before the host waited for their copy on stream {}",
                    point.stream
                )
            });
        }
    }
}
