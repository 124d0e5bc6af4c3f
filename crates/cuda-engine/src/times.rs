//! When a step's parts ran, on the host's clock.
//!
//! A device has a clock of its own, which only tells the time between two events. At the begin of a step the stream is empty, so
//! its first event and the host's look at its clock are a launch apart: some microseconds. Events of half a microsecond's
//! resolution tell the rest (CUDA driver API, `cuEventElapsedTime`).

use std::time::{Duration, Instant};

use cuda::{CudaError, Device, Event, EventUse, Stream};

/// Times of a step that has completed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepTimes {
    /// When the device could begin.
    pub began: Instant,
    /// Tables to the device, and the forward pass.
    pub forward: Duration,
    /// Logits and draws on the device. Rows that are drawn on the host come afterwards.
    pub draw: Duration,
}

impl StepTimes {
    pub fn forward_ended(&self) -> Instant {
        self.began + self.forward
    }

    pub fn draw_ended(&self) -> Instant {
        self.forward_ended() + self.draw
    }
}

/// The events of one step at a time.
#[derive(Debug)]
pub(crate) struct StepClock {
    began: Event,
    forward_ended: Event,
    draw_ended: Event,
    /// When the step that runs began.
    host_began: Option<Instant>,
}

impl StepClock {
    pub(crate) fn new(device: &Device) -> Result<Self, CudaError> {
        Ok(Self {
            began: device.event(EventUse::Timing)?,
            forward_ended: device.event(EventUse::Timing)?,
            draw_ended: device.event(EventUse::Timing)?,
            host_began: None,
        })
    }

    pub(crate) fn begin(&mut self, stream: &Stream) -> Result<(), CudaError> {
        self.host_began = Some(Instant::now());
        stream.record(&self.began)
    }

    pub(crate) fn end_forward(&self, stream: &Stream) -> Result<(), CudaError> {
        stream.record(&self.forward_ended)
    }

    pub(crate) fn end_draw(&self, stream: &Stream) -> Result<(), CudaError> {
        stream.record(&self.draw_ended)
    }

    /// The host has waited for the step. `None` if none was begun.
    pub(crate) fn times(&mut self) -> Result<Option<StepTimes>, CudaError> {
        let Some(began) = self.host_began.take() else {
            return Ok(None);
        };
        let forward = duration(self.forward_ended.ms_since(&self.began)?);
        let draw = duration(self.draw_ended.ms_since(&self.forward_ended)?);
        // What the device says cannot be later than the host has seen.
        let limit = began.elapsed();
        let forward = forward.min(limit);
        Ok(Some(StepTimes {
            began,
            forward,
            draw: draw.min(limit.saturating_sub(forward)),
        }))
    }
}

/// A time that is no number, or negative, is zero.
fn duration(ms: f32) -> Duration {
    Duration::try_from_secs_f32(ms / 1e3).unwrap_or(Duration::ZERO)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_that_makes_no_sense_is_zero() {
        assert_eq!(duration(1.5), Duration::from_micros(1_500));
        for ms in [-1.0, f32::NAN, f32::INFINITY] {
            assert_eq!(duration(ms), Duration::ZERO);
        }
    }

    #[test]
    fn parts_of_a_step_follow_each_other() {
        let began = Instant::now();
        let times = StepTimes {
            began,
            forward: Duration::from_millis(3),
            draw: Duration::from_millis(1),
        };
        assert_eq!(times.draw_ended() - began, Duration::from_millis(4));
    }
}
