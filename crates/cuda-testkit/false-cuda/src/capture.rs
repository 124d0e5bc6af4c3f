//! Owns the capture of streams into graphs, and the launch of graphs.
//!
//! From NVIDIA's programming guide: waits and queries of captured streams and events are errors; a wait for a captured event takes
//! its stream into the capture; captured work never depends on work outside; every stream has to be joined to the first one.
//! Which calls are "unsafe" while another stream of the device is captured: allocation and free, waits and queries, loading.
//! Seen on hardware by others: such a call makes captures of its own device invalid only (ROCm/rocm-systems, pull request 4508).
//! Guesses: the code where a capture is begun twice or ended without a beginning; an event stays captured after the capture's end.
//! Not modelled, so refused: allocation within a graph, a graph within a graph, external events.

use crate::codes::{Answer, Code};
use crate::objects::{Capture, CaptureMode, CaptureState, Executable, Graph, Node};
use crate::order::Mark;
use crate::state::State;
use crate::work::{Side, Work};

impl Capture {
    fn tips(&mut self, stream: usize) -> &mut Vec<usize> {
        let at = self.lanes.iter().position(|(lane, _)| *lane == stream);
        let at = at.unwrap_or_else(|| {
            self.lanes.push((stream, Vec::new()));
            self.lanes.len() - 1
        });
        &mut self.lanes[at].1
    }

    fn lane(&self, stream: usize) -> usize {
        self.lanes.iter().position(|(lane, _)| *lane == stream).unwrap_or(0)
    }

    /// Whether all work is before the end of the first stream.
    fn is_joined(&self) -> bool {
        let mut is_before = vec![false; self.nodes.len()];
        let mut open: Vec<usize> = self.lanes.first().map_or_else(Vec::new, |(_, tips)| tips.clone());
        while let Some(node) = open.pop() {
            if !std::mem::replace(&mut is_before[node], true) {
                open.extend(&self.nodes[node].after);
            }
        }
        is_before.iter().all(|is_before| *is_before)
    }
}

impl State {
    pub(crate) fn begin_capture(&mut self, stream: usize, mode: CaptureMode) -> Answer {
        let device = self.streams[stream].device;
        if stream == self.devices[device].default_stream {
            return Err(Code::STREAM_CAPTURE_UNSUPPORTED);
        }
        if self.streams[stream].capture.is_some() {
            return Err(Code::ILLEGAL_STATE);
        }
        let id = self.new_handle();
        let capture = Capture {
            device,
            mode,
            thread: std::thread::current().id(),
            state: CaptureState::Active,
            nodes: Vec::new(),
            lanes: vec![(stream, Vec::new())],
        };
        self.captures.insert(id, capture);
        self.streams[stream].capture = Some(id);
        Ok(())
    }

    /// The capture that a stream is in, if it is still of use.
    fn active_capture(&mut self, id: u64) -> Result<&mut Capture, Code> {
        let capture = self.captures.get_mut(&id).ok_or(Code::UNKNOWN)?;
        match capture.state {
            CaptureState::Active => Ok(capture),
            CaptureState::Invalidated => Err(Code::STREAM_CAPTURE_INVALIDATED),
        }
    }

    pub(crate) fn capture_work(&mut self, id: u64, stream: usize, work: Work) -> Answer {
        let is_refused = match &work {
            Work::Free(_) => true,
            Work::Outside(outside) => !outside.is_repeatable,
            _ => false,
        };
        if let Work::Copy(copy) = &work
            && let Side::Host(at) = copy.from
            && !self.is_pinned(at, copy.bytes)
        {
            self.misuse("a graph reads pageable memory, which may be gone when it runs");
        }
        let capture = self.active_capture(id)?;
        if is_refused {
            capture.state = CaptureState::Invalidated;
            return Err(Code::STREAM_CAPTURE_UNSUPPORTED);
        }
        let node = capture.nodes.len();
        let after = std::mem::replace(capture.tips(stream), vec![node]);
        let lane = capture.lane(stream);
        capture.nodes.push(Node { lane, after, work });
        Ok(())
    }

    /// What an event that is recorded in a capture stands for.
    pub(crate) fn captured_tips(&mut self, id: u64, stream: usize) -> Result<Vec<usize>, Code> {
        Ok(self.active_capture(id)?.tips(stream).clone())
    }

    /// A stream waits for an event of a capture: it belongs to the capture from now on.
    pub(crate) fn join_capture(&mut self, stream: usize, id: u64, tips: &[usize]) -> Answer {
        match self.streams[stream].capture {
            Some(other) if other != id => {
                self.invalidate_capture(other);
                self.invalidate_capture(id);
                return Err(Code::STREAM_CAPTURE_MERGE);
            }
            Some(_) => {}
            None => {
                if stream == self.devices[self.streams[stream].device].default_stream {
                    self.invalidate_capture(id);
                    return Err(Code::STREAM_CAPTURE_IMPLICIT);
                }
                if !self.captures.contains_key(&id) {
                    return Err(Code::STREAM_CAPTURE_ISOLATION);
                }
                self.streams[stream].capture = Some(id);
            }
        }
        let mine = self.active_capture(id)?.tips(stream);
        for tip in tips {
            if !mine.contains(tip) {
                mine.push(*tip);
            }
        }
        Ok(())
    }

    pub(crate) fn invalidate_capture(&mut self, id: u64) {
        if let Some(capture) = self.captures.get_mut(&id) {
            capture.state = CaptureState::Invalidated;
        }
    }

    /// For a call that is not permitted on a captured stream.
    pub(crate) fn refuse_captured(&mut self, stream: usize) -> Answer {
        let Some(id) = self.streams[stream].capture else {
            return Ok(());
        };
        self.invalidate_capture(id);
        Err(Code::STREAM_CAPTURE_UNSUPPORTED)
    }

    /// For a call that is not safe while streams of the device are captured.
    pub(crate) fn refuse_in_capture(&mut self) -> Answer {
        let (device, me) = (self.current_device()?, std::thread::current().id());
        self.refuse_where(|capture| {
            let is_mine = capture.thread == me && capture.mode != CaptureMode::Relaxed;
            capture.device == device && (is_mine || capture.mode == CaptureMode::Global)
        })
    }

    /// For a call that concerns every stream of the device.
    pub(crate) fn refuse_in_any_capture(&mut self) -> Answer {
        let device = self.current_device()?;
        self.refuse_where(|capture| capture.device == device)
    }

    fn refuse_where(&mut self, is_hit: impl Fn(&Capture) -> bool) -> Answer {
        let mut is_refused = false;
        for capture in self.captures.values_mut().filter(|capture| is_hit(capture)) {
            capture.state = CaptureState::Invalidated;
            is_refused = true;
        }
        if is_refused {
            Err(Code::STREAM_CAPTURE_UNSUPPORTED)
        } else {
            Ok(())
        }
    }

    pub(crate) fn end_capture(&mut self, stream: usize) -> Result<Graph, Code> {
        let id = self.streams[stream].capture.ok_or(Code::ILLEGAL_STATE)?;
        let capture = self.captures.get_mut(&id).ok_or(Code::UNKNOWN)?;
        if capture.lanes.first().is_none_or(|(first, _)| *first != stream) {
            capture.state = CaptureState::Invalidated;
            return Err(Code::STREAM_CAPTURE_UNMATCHED);
        }
        if capture.mode != CaptureMode::Relaxed && capture.thread != std::thread::current().id() {
            return Err(Code::STREAM_CAPTURE_WRONG_THREAD);
        }
        let capture = self.drop_capture(id).ok_or(Code::UNKNOWN)?;
        if capture.state == CaptureState::Invalidated {
            return Err(Code::STREAM_CAPTURE_INVALIDATED);
        }
        if !capture.is_joined() {
            return Err(Code::STREAM_CAPTURE_UNJOINED);
        }
        Ok(Graph {
            device: capture.device,
            lane_count: capture.lanes.len(),
            nodes: capture.nodes.into(),
        })
    }

    /// Takes every stream out of a capture.
    pub(crate) fn drop_capture(&mut self, id: u64) -> Option<Capture> {
        for stream in self.streams.iter_mut().filter(|stream| stream.capture == Some(id)) {
            stream.capture = None;
        }
        self.captures.remove(&id)
    }

    pub(crate) fn instantiate(&mut self, graph: Graph) -> Executable {
        let lanes = (1..graph.lane_count)
            .map(|_| self.new_stream(graph.device, false))
            .collect();
        Executable {
            graph,
            lanes,
            last: None,
        }
    }

    /// Gives the work of a graph to a stream. Lanes but the first run beside it, between its start and its end there.
    pub(crate) fn launch_graph(&mut self, executable: u64, stream: usize) -> Answer {
        self.refuse_captured(stream)?;
        let found = self.executables.get(&executable).ok_or(Code::INVALID_HANDLE)?;
        let (nodes, lanes, before) = (found.graph.nodes.clone(), found.lanes.clone(), found.last.clone());
        if found.graph.device != self.streams[stream].device {
            return Err(Code::INVALID_VALUE);
        }
        self.submit_after(stream, Work::Nothing, before.into_iter().collect())?;
        let start = self.streams[stream].last.clone();
        let mut marks: Vec<Mark> = Vec::with_capacity(nodes.len());
        for node in &*nodes {
            let to = node.lane.checked_sub(1).map_or(stream, |lane| lanes[lane]);
            let mut after: Vec<Mark> = node.after.iter().map(|node| marks[*node].clone()).collect();
            after.push(start.clone());
            self.submit_after(to, node.work.clone(), after)?;
            marks.push(self.streams[to].last.clone());
        }
        let ends = lanes.iter().map(|lane| self.streams[*lane].last.clone()).collect();
        self.submit_after(stream, Work::Nothing, ends)?;
        let last = self.streams[stream].last.clone();
        if let Some(executable) = self.executables.get_mut(&executable) {
            executable.last = Some(last);
        }
        Ok(())
    }
}
