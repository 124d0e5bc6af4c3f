//! The CUDA device that has a node's KV, as the node's transports use it: copies beside the engine's work, pinned memory for
//! bytes that go by way of the host, and waits that have a deadline. The engine opens the device; nothing here looks for a library.
//!
//! A copy that does not end in time may still read and write for ever. Its bytes are then kept: no owner gets them back, and
//! nothing that it uses is freed. [`DeviceKv::keep`] counts that. The device is given up, so its node ends.

mod buffer;
mod downloads;
mod driver;
mod fault;
mod lane;
mod uploads;

use std::any::Any;
use std::fmt;
use std::hash::Hasher as _;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use twox_hash::XxHash3_64;

use self::downloads::Downloads;
pub(crate) use self::driver::{
    Device, DeviceMemory, Event, IPC_HANDLE_BYTES, ImportedMemory, Libraries, Stream, pointer,
};
pub use self::fault::DeviceFault;
pub(crate) use self::lane::{Lane, wait_for};
use self::uploads::Uploads;
use crate::span::{DeviceAddress, Lent};

/// Looks at the end of uploads that follow each other without a pause. The last block of a handoff is there before most of
/// them are over.
const LOOKS_WITHOUT_PAUSE: u32 = 50;
/// Between later looks. Tokio's timer knows no shorter time.
const PAUSE: Duration = Duration::from_millis(1);

/// What the engine gives. The types behind `Any` are those of the `cuda` crate.
#[derive(Clone)]
pub struct DeviceParts {
    /// What was found when the engine looked for libraries: `cuda::Libraries`.
    pub libraries: Arc<dyn Any + Send + Sync>,
    /// `cuda::Device`.
    pub device: Arc<dyn Any + Send + Sync>,
    /// The one allocation of all blocks: `cuda::DeviceMemory`.
    pub memory: Arc<dyn Any + Send + Sync>,
    /// The event of the last step that has completed: `Mutex<Option<cuda::Event>>`.
    pub completed: Arc<dyn Any + Send + Sync>,
    /// The first byte of the pool.
    pub address: DeviceAddress,
}

impl fmt::Debug for DeviceParts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceParts").finish_non_exhaustive()
    }
}

/// How long a node waits for its device and for the communicators of its pairs.
#[derive(Clone, Copy, Debug)]
pub struct DeviceLimits {
    /// One copy. It takes milliseconds, but it may have to wait for kernels of a step, and a step of a long prompt takes seconds.
    /// The pair's own window judges a slow copy first, and does so without giving anything up.
    pub copy_wait: Duration,
    /// The making of a communicator, from the wish for it to the first byte that may travel. Two ranks need less than a second;
    /// the rest is for a node that loads its library from a slow disk.
    pub communicator_wait: Duration,
    /// One group of frames. Longer than the stall window, so that the pair's own watch judges a slow network first.
    pub group_wait: Duration,
    /// An abort. Afterwards its thread and its memory count as kept.
    pub abort_wait: Duration,
}

impl Default for DeviceLimits {
    fn default() -> Self {
        Self {
            copy_wait: Duration::from_secs(30),
            communicator_wait: Duration::from_secs(15),
            group_wait: Duration::from_secs(8),
            abort_wait: Duration::from_secs(5),
        }
    }
}

/// A node's KV pool on its device.
pub struct DeviceKv {
    libraries: Arc<Libraries>,
    device: Arc<Device>,
    pool: Arc<DeviceMemory>,
    completed: Arc<Mutex<Option<Event>>>,
    address: DeviceAddress,
    limits: DeviceLimits,
    downloads: Downloads,
    uploads: Uploads,
    kept: AtomicU64,
    is_given_up: AtomicBool,
}

impl fmt::Debug for DeviceKv {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceKv")
            .field("uuid", &self.uuid())
            .finish_non_exhaustive()
    }
}

impl DeviceKv {
    /// Makes streams and pinned buffers. Call it before the first communicator: the driver may wait for all of a device's work
    /// when it makes pinned memory.
    ///
    /// # Errors
    /// The parts are not those of a CUDA device, or the device refuses.
    pub fn open(parts: DeviceParts, limits: DeviceLimits) -> Result<Arc<Self>, DeviceFault> {
        let device: Arc<Device> = known(parts.device)?;
        Ok(Arc::new(Self {
            libraries: known(parts.libraries)?,
            pool: known(parts.memory)?,
            completed: known(parts.completed)?,
            address: parts.address,
            limits,
            downloads: Downloads::new(&device)?,
            uploads: Uploads::new(&device)?,
            device,
            kept: AtomicU64::new(0),
            is_given_up: AtomicBool::new(false),
        }))
    }

    pub(crate) fn libraries(&self) -> &Libraries {
        &self.libraries
    }

    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    pub(crate) fn uuid(&self) -> &str {
        &self.device.facts().uuid
    }

    pub(crate) fn limits(&self) -> DeviceLimits {
        self.limits
    }

    /// The first byte of the pool.
    pub fn pool(&self) -> DeviceAddress {
        self.address
    }

    /// Copies bytes of the device into `out`, by way of pinned memory. For a blocking thread.
    ///
    /// # Errors
    /// [`DeviceFault`]; [`Lent`] says what may still read the bytes.
    pub fn download(&self, from: DeviceAddress, out: &mut [u8]) -> (Result<(), DeviceFault>, Lent) {
        let bytes = out.len();
        let mut rest = &mut *out;
        let copied = self.each((from, bytes), &mut |part| {
            let (place, after) = std::mem::take(&mut rest).split_at_mut(part.len());
            place.copy_from_slice(part);
            rest = after;
        });
        let lent = DeviceFault::lent(&copied);
        (copied, lent)
    }

    /// Copies bytes to the device, by way of pinned memory. They are taken when it returns, and they are there when
    /// [`uploaded`](Self::uploaded), called afterwards, has ended. It waits only while every pinned buffer is under way.
    ///
    /// # Errors
    /// [`DeviceFault`]. A part of the bytes may still come.
    pub fn upload(&self, to: DeviceAddress, bytes: &[u8]) -> Result<(), DeviceFault> {
        let waits = (&*self.completed, self.limits.copy_wait);
        self.judged(self.uploads.launch((to, bytes), waits))
    }

    /// Waits until everything that was uploaded before the call is there.
    ///
    /// # Errors
    /// [`DeviceFault`]. The bytes may still come.
    pub async fn uploaded(&self) -> Result<(), DeviceFault> {
        let (last, begun) = (self.uploads.launched(), Instant::now());
        let mut looks = 0;
        while !self.uploads.have_completed(last)? {
            let waited = begun.elapsed();
            if waited >= self.limits.copy_wait {
                self.keep("bytes on their way to the device");
                return self.judged(Err(DeviceFault::Late { waited }));
            }
            looks += 1;
            match looks {
                ..LOOKS_WITHOUT_PAUSE => tokio::task::yield_now().await,
                _ => tokio::time::sleep(PAUSE).await,
            }
        }
        Ok(())
    }

    /// Whether something that was uploaded is still on its way.
    pub fn is_uploading(&self) -> bool {
        !matches!(self.uploads.have_completed(self.uploads.launched()), Ok(true))
    }

    /// The checksum of bytes on the device. They come to the host for it. For a blocking thread.
    pub(crate) fn checksum(&self, from: DeviceAddress, bytes: usize) -> Result<u64, DeviceFault> {
        let mut hasher = XxHash3_64::new();
        self.each((from, bytes), &mut |part| hasher.write(part))?;
        Ok(hasher.finish())
    }

    fn each(&self, bytes: (DeviceAddress, usize), take: &mut dyn FnMut(&[u8])) -> Result<(), DeviceFault> {
        let waits = (&*self.completed, self.limits.copy_wait);
        let copied = self.downloads.each(bytes, waits, take);
        if DeviceFault::lent(&copied) == Lent::Kept {
            self.keep("a pinned buffer");
        }
        self.judged(copied)
    }

    /// A device that does not end a copy in time is given up. Else each later step that gets the copy's block would fail.
    fn judged(&self, copied: Result<(), DeviceFault>) -> Result<(), DeviceFault> {
        if let Err(DeviceFault::Late { .. }) = &copied {
            self.is_given_up.store(true, Ordering::SeqCst);
            self.device.give_up();
        }
        copied
    }

    /// A copy did not end in time. The node must end: an idle engine would not notice it.
    pub fn is_given_up(&self) -> bool {
        self.is_given_up.load(Ordering::SeqCst)
    }

    /// Copies bytes to the device and waits until they are there. For a blocking thread.
    pub(crate) fn upload_now(&self, to: DeviceAddress, bytes: &[u8]) -> Result<(), DeviceFault> {
        self.upload(to, bytes)?;
        let (last, begun) = (self.uploads.launched(), Instant::now());
        while !self.uploads.have_completed(last)? {
            let waited = begun.elapsed();
            if waited >= self.limits.copy_wait {
                return self.judged(Err(DeviceFault::Late { waited }));
            }
            std::thread::yield_now();
        }
        Ok(())
    }

    /// Copies between two places of devices and waits until the bytes are there. For a blocking thread.
    pub(crate) fn copy(
        &self,
        (lane, done): (&Lane, &Event),
        (from, to): (DeviceAddress, DeviceAddress),
        bytes: usize,
    ) -> Result<(), DeviceFault> {
        lane.launch((&*self.completed, done), |stream| {
            stream.copy_on_device(pointer(to), pointer(from), bytes)
        })?;
        self.judged(wait_for(done, self.limits.copy_wait))
    }

    /// A stream for copies of one pair.
    pub(crate) fn lane(&self) -> Result<Lane, DeviceFault> {
        Lane::new(&self.device)
    }

    /// A stream for work that its caller launches.
    pub(crate) fn stream(&self) -> Result<Stream, DeviceFault> {
        self.device.stream().map_err(DeviceFault::Refused)
    }

    pub(crate) fn event(&self) -> Result<Event, DeviceFault> {
        driver::event(&self.device).map_err(DeviceFault::Refused)
    }

    /// Memory that is no block.
    pub(crate) fn allocate(&self, bytes: usize) -> Result<DeviceMemory, DeviceFault> {
        self.device.allocate(bytes).map_err(DeviceFault::Refused)
    }

    /// The handle by which another process of this host opens the pool.
    pub(crate) fn export(&self) -> Result<[u8; IPC_HANDLE_BYTES], DeviceFault> {
        driver::export(&self.pool).map_err(DeviceFault::Refused)
    }

    /// Opens the pool of another process.
    pub(crate) fn import(&self, handle: [u8; IPC_HANDLE_BYTES]) -> Result<ImportedMemory, DeviceFault> {
        driver::import(&self.device, handle).map_err(DeviceFault::Refused)
    }

    /// Counts something that is never given back, because the device may still use it.
    pub(crate) fn keep(&self, what: &'static str) {
        let kept = self.kept.fetch_add(1, Ordering::Relaxed) + 1;
        tracing::error!(
            what,
            kept,
            "kept for the rest of this process, because the device may still use it; restart the node"
        );
    }

    #[cfg(test)]
    pub(crate) fn kept(&self) -> u64 {
        self.kept.load(Ordering::Relaxed)
    }
}

fn known<T: Any + Send + Sync>(part: Arc<dyn Any + Send + Sync>) -> Result<Arc<T>, DeviceFault> {
    part.downcast().map_err(|_| DeviceFault::NotCuda)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
