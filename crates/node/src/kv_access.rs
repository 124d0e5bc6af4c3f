//! How handoffs reach the bytes of this node's KV memory. They are in host memory, or on a CUDA device, from which transports copy
//! them directly or by way of pinned memory. The engine decides which. If transports cannot address the engine's device, the bytes go
//! by way of the host.

use std::ops::Range;
use std::sync::Arc;

use engine::{KvAccessError, KvMemory, LentBytes};
use kv_transfer::span::{DeviceAddress, Lending, Lent, Span, SpanMut};
use kv_transfer::{DeviceEnd, DeviceFault, DeviceKv, DeviceLimits, DeviceParts, DevicePlace};
use serving_core::ids::BlockId;

pub(crate) type AnyError = Box<dyn std::error::Error + Send + Sync>;

/// The KV memory, and its device if transports can address it.
#[derive(Clone, Debug)]
pub struct KvAccess {
    kv: Arc<KvMemory>,
    device: Option<Arc<DeviceKv>>,
}

impl KvAccess {
    /// # Errors
    /// The device gives no stream or no pinned memory.
    pub fn of(kv: &Arc<KvMemory>) -> Result<Self, DeviceFault> {
        let device = kv.device_pool().map(|pool| {
            let parts = DeviceParts {
                libraries: pool.libraries,
                device: pool.device,
                memory: pool.memory,
                completed: pool.completed,
                address: DeviceAddress(pool.address),
            };
            DeviceKv::open(parts, DeviceLimits::default())
        });
        Ok(Self {
            kv: kv.clone(),
            device: device.transpose()?,
        })
    }

    /// For memory that the host computes in.
    pub(crate) fn on_host(kv: &Arc<KvMemory>) -> Self {
        Self {
            kv: kv.clone(),
            device: None,
        }
    }

    pub fn memory(&self) -> &Arc<KvMemory> {
        &self.kv
    }

    /// For transports that move KV from device to device.
    pub fn device_end(&self, in_place: Option<DevicePlace>, has_checksums: bool) -> Option<DeviceEnd> {
        let kv = self.device.clone()?;
        Some(DeviceEnd {
            kv,
            in_place,
            has_checksums,
        })
    }

    /// Copies layers of a block out. It waits for the device.
    pub fn export(&self, block: BlockId, layers: Range<u32>, out: SpanMut<'_>) -> Result<(), AnyError> {
        let out = out.host()?;
        let Some(device) = &self.device else {
            return Ok(self.kv.export_layers(block, layers, out)?);
        };
        self.check_length(&layers, out.len())?;
        let copied = self.kv.lend_to_reader(block, layers, |offset| {
            let (copied, lent) = device.download(device.pool().offset(offset), out);
            (copied, of_engine(lent))
        })?;
        Ok(copied?)
    }

    /// Shows layers of a block: where they are, or a copy of a device's. It waits for the device.
    pub fn show(
        &self,
        block: BlockId,
        layers: Range<u32>,
        show: &mut dyn FnMut(&[u8]) -> bool,
    ) -> Result<bool, AnyError> {
        let Some(device) = &self.device else {
            return Ok(self.kv.read_layers(block, layers, show)?);
        };
        let mut bytes = vec![0; self.kv.geometry().layer_bytes() * layers.len()];
        let copied = self.kv.lend_to_reader(block, layers, |offset| {
            let (copied, lent) = device.download(device.pool().offset(offset), &mut bytes);
            (copied, of_engine(lent))
        })?;
        copied?;
        Ok(show(&bytes))
    }

    /// Copies bytes into layers of a reserved block. On a device they are there when [`settled`](Self::settled) has ended.
    pub fn import(&self, block: BlockId, layers: Range<u32>, data: Span<'_>) -> Result<(), AnyError> {
        let data = data.host()?;
        let Some(device) = &self.device else {
            return Ok(self.kv.import_layers(block, layers, data)?);
        };
        self.check_length(&layers, data.len())?;
        // The claim ends with the launch: until the transfer is committed or has ended, and both wait for the copies, nobody
        // else asks for the block.
        let launched = self.kv.lend_to_writer(block, layers, |offset| {
            (device.upload(device.pool().offset(offset), data), LentBytes::Back)
        })?;
        Ok(launched?)
    }

    /// Lends layers of a block for reading, if a device has them.
    pub fn lend_to_reader(
        &self,
        (block, layers): (BlockId, Range<u32>),
        copy: &mut dyn FnMut(DeviceAddress) -> Lent,
    ) -> Result<Lending, KvAccessError> {
        let Some(device) = &self.device else {
            return Ok(Lending::NotOnDevice);
        };
        self.kv.lend_to_reader(block, layers, |offset| {
            (Lending::Lent, of_engine(copy(device.pool().offset(offset))))
        })
    }

    /// The same for writing.
    pub fn lend_to_writer(
        &self,
        (block, layers): (BlockId, Range<u32>),
        copy: &mut dyn FnMut(DeviceAddress) -> Lent,
    ) -> Result<Lending, KvAccessError> {
        let Some(device) = &self.device else {
            return Ok(Lending::NotOnDevice);
        };
        self.kv.lend_to_writer(block, layers, |offset| {
            (Lending::Lent, of_engine(copy(device.pool().offset(offset))))
        })
    }

    /// Whether transports address the memory of a device. Then imports may wait for it.
    pub fn is_on_device(&self) -> bool {
        self.device.is_some()
    }

    /// The device does not end its copies.
    pub fn is_given_up(&self) -> bool {
        self.device.as_ref().is_some_and(|device| device.is_given_up())
    }

    /// Whether an import is still on its way to the device.
    pub fn is_settling(&self) -> bool {
        self.device.as_ref().is_some_and(|device| device.is_uploading())
    }

    /// Waits until all imports before the call are in their place.
    ///
    /// # Errors
    /// The device does not answer. The bytes may still come, so their blocks must not be used again.
    pub async fn settled(&self) -> Result<(), DeviceFault> {
        match &self.device {
            Some(device) => device.uploaded().await,
            None => Ok(()),
        }
    }

    fn check_length(&self, layers: &Range<u32>, got: usize) -> Result<(), KvAccessError> {
        let expected = self.kv.geometry().layer_bytes() * layers.len();
        match got == expected {
            true => Ok(()),
            false => Err(KvAccessError::WrongLength { expected, got }),
        }
    }
}

fn of_engine(lent: Lent) -> LentBytes {
    match lent {
        Lent::Back => LentBytes::Back,
        Lent::Kept => LentBytes::Kept,
    }
}
