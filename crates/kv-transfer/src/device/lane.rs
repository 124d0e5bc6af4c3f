//! A stream of copies beside the engine's streams, and waits for a device that have a deadline.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use super::driver::{CudaError, Device, Event, Stream};
use super::fault::DeviceFault;
use super::lock;

/// Looks at an event that follow each other without a pause. A copy of a small block takes less time than a thread needs to
/// fall asleep and to wake.
const LOOKS_WITHOUT_PAUSE: u32 = 200;
/// Between later looks.
const PAUSE: Duration = Duration::from_micros(50);

/// Copies run in the order in which they were launched here, and beside everything else on the device.
pub(crate) struct Lane(Mutex<Stream>);

impl Lane {
    pub fn new(device: &Device) -> Result<Self, DeviceFault> {
        Ok(Self(Mutex::new(device.stream().map_err(DeviceFault::Refused)?)))
    }

    /// Launches work behind the last step that has completed. That step has written every block that anybody pushes. The wait
    /// for it costs nothing on the device, and tells its driver of the order. `done` comes when the work is over.
    pub fn launch(
        &self,
        (completed, done): (&Mutex<Option<Event>>, &Event),
        work: impl FnOnce(&Stream) -> Result<(), CudaError>,
    ) -> Result<(), DeviceFault> {
        let stream = lock(&self.0);
        if let Some(step) = &*lock(completed) {
            stream.wait(step).map_err(DeviceFault::Refused)?;
        }
        work(&stream).map_err(DeviceFault::Refused)?;
        stream.record(done).map_err(DeviceFault::Failed)
    }
}

/// Waits for the event of launched work. For a blocking thread.
pub(crate) fn wait_for(done: &Event, limit: Duration) -> Result<(), DeviceFault> {
    let begun = Instant::now();
    let mut looks = 0;
    while !done.is_done().map_err(DeviceFault::Failed)? {
        let waited = begun.elapsed();
        if waited >= limit {
            return Err(DeviceFault::Late { waited });
        }
        looks += 1;
        match looks {
            ..LOOKS_WITHOUT_PAUSE => std::hint::spin_loop(),
            _ => std::thread::park_timeout(PAUSE),
        }
    }
    Ok(())
}
