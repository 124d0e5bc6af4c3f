//! The names of the crate `cuda` that this folder uses, and what it does with them: compile, upload, download.
//! A change of that crate's spelling ends here.

pub(crate) use cuda::loader::{LibraryDecision, Version};
pub(crate) use cuda::nvrtc::{Arch, ArchError, CompileError};
pub(crate) use cuda::{
    Args, CudaError, Device, DeviceFacts, DeviceMemory, DevicePtr, Function, Geometry, Image, Libraries, Module, Stream,
};

use cuda::nvrtc::{self, Source};

use super::source::{HEADERS, OPTIONS, Unit};

/// What NVRTC made of a unit.
pub(crate) struct Compiled {
    pub cubin: Vec<u8>,
    pub ptx: String,
    pub log: String,
}

pub(crate) fn compile(libraries: &Libraries, unit: Unit, arch: Arch) -> Result<Compiled, CompileError> {
    let owned = |(name, text): &(&str, &str)| ((*name).to_owned(), (*text).to_owned());
    let source = Source {
        name: unit.file.name().to_owned(),
        text: unit.file.text().to_owned(),
        headers: HEADERS.iter().map(owned).collect(),
        defines: unit.defines(),
        options: OPTIONS.map(str::to_owned).to_vec(),
    };
    let compiled = nvrtc::compile(libraries, &source, arch)?;
    Ok(Compiled {
        cubin: compiled.cubin,
        ptx: compiled.ptx,
        log: compiled.log,
    })
}

/// Memory of the device with these bytes. Waits for the copy.
pub(crate) fn upload(device: &Device, stream: &Stream, bytes: &[u8]) -> Result<DeviceMemory, CudaError> {
    // An allocation of no bytes is an error.
    let memory = device.allocate(bytes.len().max(1))?;
    if !bytes.is_empty() {
        let mut staged = device.allocate_pinned(bytes.len())?;
        staged.write(0, bytes)?;
        stream.copy_to_device(memory.ptr(), &staged, 0..bytes.len())?;
        stream.synchronize()?;
    }
    Ok(memory)
}

/// The bytes of memory of the device, after everything that the stream was given before.
pub(crate) fn download(device: &Device, stream: &Stream, memory: &DeviceMemory) -> Result<Vec<u8>, CudaError> {
    let staged = device.allocate_pinned(memory.bytes())?;
    stream.copy_to_host(&staged, 0, memory.ptr(), memory.bytes())?;
    stream.synchronize()?;
    Ok(staged.read()?.to_vec())
}
