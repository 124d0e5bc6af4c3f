//! Graphs: work that was captured from a stream once and is launched as a whole.
//!
//! During a capture its thread must not allocate, wait, ask or copy with pinned memory: such calls of this crate are refused
//! before they reach the driver, which would break the capture. Memory that is dropped meanwhile is freed afterwards.

use std::cell::Cell;
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUstreamCaptureMode};

use super::capturing::{Kept, set};
use super::context::Context;
use super::handle::Raw;
use super::stream::Stream;
use crate::calls;
use crate::error::{CudaError, check};

/// A capture that is under way. It is ended also when its work panics.
struct Capture<'a> {
    stream: Option<&'a Stream>,
}

/// What a capture recorded, before it can be launched.
struct Recorded {
    graph: Raw<sys::CUgraph_st>,
    modules: Vec<Kept>,
}

impl Drop for Recorded {
    fn drop(&mut self) {
        if !self.graph.0.is_null() {
            // SAFETY: this value owns the graph. What was made of it is independent.
            let _ = unsafe { calls::cuGraphDestroy(self.graph.0) };
        }
    }
}

impl<'a> Capture<'a> {
    fn begin(stream: &'a Stream) -> Result<Self, CudaError> {
        // Other threads may go on with calls that this one must not make.
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is alive.
        let begun = unsafe { calls::cuStreamBeginCapture_v2(stream.raw().0, mode) };
        check("cuStreamBeginCapture", begun, String::new)?;
        set(Some(Vec::new()));
        Ok(Self { stream: Some(stream) })
    }

    fn end(mut self) -> Result<Recorded, CudaError> {
        match self.stream.take() {
            Some(stream) => end(stream),
            None => Err(CudaError::misuse(
                "cuStreamEndCapture",
                "the capture has ended before",
                "",
            )),
        }
    }
}

impl Drop for Capture<'_> {
    fn drop(&mut self) {
        if let Some(stream) = self.stream.take() {
            // Only after a panic, which says more.
            let _ = end(stream);
        }
    }
}

fn end(stream: &Stream) -> Result<Recorded, CudaError> {
    let modules = set(None);
    let mut recorded = Recorded {
        graph: Raw(std::ptr::null_mut()),
        modules,
    };
    // SAFETY: the stream is alive, and the driver writes one handle, or null.
    let ended = unsafe { calls::cuStreamEndCapture(stream.raw().0, &raw mut recorded.graph.0) };
    check("cuStreamEndCapture", ended, String::new)?;
    Ok(recorded)
}

/// Work that can be launched again and again, on any stream of the device, by one thread at a time.
pub struct Graph {
    context: Arc<Context>,
    raw: Raw<sys::CUgraphExec_st>,
    /// The code of its kernels.
    modules: Vec<Kept>,
    /// The driver does not allow launches of one graph by two threads at the same time.
    _one_thread: PhantomData<Cell<()>>,
}

impl fmt::Debug for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Graph")
            .field("modules", &self.modules.len())
            .finish_non_exhaustive()
    }
}

impl Graph {
    /// Captures what `work` puts onto the stream, instead of running it.
    pub(super) fn capture(
        stream: &Stream,
        work: impl FnOnce(&Stream) -> Result<(), CudaError>,
    ) -> Result<Self, CudaError> {
        let context = stream.context();
        context.enter_outside_capture("cuStreamBeginCapture")?;
        let capture = Capture::begin(stream)?;
        let worked = work(stream);
        let recorded = capture.end();
        context.collect();
        worked?;
        let mut recorded = recorded?;
        let mut raw: sys::CUgraphExec = std::ptr::null_mut();
        // SAFETY: the graph is alive, and the driver writes one handle.
        let made = unsafe { calls::cuGraphInstantiateWithFlags(&raw mut raw, recorded.graph.0, 0) };
        check("cuGraphInstantiate", made, String::new)?;
        Ok(Self {
            context: context.clone(),
            raw: Raw(raw),
            modules: std::mem::take(&mut recorded.modules),
            _one_thread: PhantomData,
        })
    }

    pub(super) fn launch(&self, stream: &Stream) -> Result<(), CudaError> {
        self.context.enter()?;
        // SAFETY: both are alive, and one thread has this value.
        check(
            "cuGraphLaunch",
            unsafe { calls::cuGraphLaunch(self.raw.0, stream.raw().0) },
            String::new,
        )
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // SAFETY: this value owns it. The driver keeps what a stream still runs of it.
            let _ = unsafe { calls::cuGraphExecDestroy(self.raw.0) };
        }
    }
}

impl Stream {
    /// Captures what `work` gives to this stream, and to streams that it joins by events, instead of running it. Memory that
    /// the work names must live as long as the graph.
    ///
    /// # Errors
    /// Those of `work`; a call in it that cannot be captured; a joined stream that was not joined back.
    pub fn capture(&self, work: impl FnOnce(&Stream) -> Result<(), CudaError>) -> Result<Graph, CudaError> {
        Graph::capture(self, work)
    }

    /// # Errors
    /// The device has failed.
    pub fn launch_graph(&self, graph: &Graph) -> Result<(), CudaError> {
        graph.launch(self)
    }
}
