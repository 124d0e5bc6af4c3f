//! The compiler of kernels, NVRTC: text in, machine code out. It needs no GPU and no driver.

mod arch;

use std::ffi::{CString, c_char, c_int};

use thiserror::Error;

pub use self::arch::{Arch, ArchError};
use crate::loader::{Libraries, LibraryDecision, NvrtcTable, Program};

/// Codes of NVRTC (nvrtc.h).
const SUCCESS: c_int = 0;
const COMPILATION: c_int = 6;
/// Also the answer to an architecture that this NVRTC does not know.
const INVALID_OPTION: c_int = 5;
/// No output of a compiler is as long; a length beyond it is a broken library.
const OUTPUT_BYTES_MAX: usize = 256 << 20;

/// What is compiled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    /// As errors and line numbers name it.
    pub name: String,
    pub text: String,
    /// Name and text of each file that it includes. No folder is searched.
    pub headers: Vec<(String, String)>,
    /// `NAME=VALUE`.
    pub defines: Vec<String>,
    /// Whole options of NVRTC, besides the architecture.
    pub options: Vec<String>,
}

/// What came of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Compiled {
    /// Machine code for the architecture.
    pub cubin: Vec<u8>,
    pub ptx: String,
    /// Warnings, and with `--ptxas-options=-v` the registers and spills of each kernel.
    pub log: String,
}

/// Why there is no code.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum CompileError {
    #[error("there is no NVRTC: {0}")]
    NoCompiler(LibraryDecision),
    #[error("`{name}` does not compile for {arch}; a bug of baton, or an NVRTC that does not know the GPU:\n{log}")]
    Source { name: String, arch: String, log: String },
    #[error(
        "this NVRTC does not know {arch}: install a newer one, and name its folder in BATON_CUDA_PATH if an older one is found first; {log}"
    )]
    UnknownArch { arch: String, log: String },
    #[error("NVRTC failed: {call} answers {code} ({text}) for `{name}`; {log}")]
    Failed {
        call: &'static str,
        code: i32,
        text: String,
        name: String,
        log: String,
    },
    #[error("a name, a text or an option of `{name}` has a zero byte: a bug of baton")]
    ZeroByte { name: String },
    #[error("NVRTC made an output of {bytes} bytes of `{name}`, which cannot be")]
    AbsurdOutput { name: String, bytes: usize },
}

/// Compiles for one architecture. It takes 0.03 to 6 seconds of one core.
///
/// # Errors
/// [`CompileError`], with the compiler's own words.
pub fn compile(libraries: &Libraries, source: &Source, arch: Arch) -> Result<Compiled, CompileError> {
    let table = libraries.nvrtc().map_err(CompileError::NoCompiler)?;
    let run = Run::create(table, source)?;
    let mut options = vec![format!("--gpu-architecture={arch}")];
    options.extend(source.options.iter().cloned());
    options.extend(source.defines.iter().map(|define| format!("-D{define}")));
    let options = CTexts::of(&options, source)?;
    let pointers = options.pointers();
    // SAFETY: the program is alive, and so are the texts of the options, each with an end.
    let code = unsafe { (table.compile)(run.program, options.count(), pointers.as_ptr()) };
    // Whether there is a log says nothing about the code.
    let log = run
        .text(("nvrtcGetProgramLog", table.log_size, table.log))
        .unwrap_or_default();
    let log = String::from_utf8_lossy(&log).trim().to_owned();
    match code {
        SUCCESS => {}
        COMPILATION => {
            let (name, arch) = (source.name.clone(), arch.to_string());
            return Err(CompileError::Source { name, arch, log });
        }
        INVALID_OPTION => {
            let arch = arch.to_string();
            return Err(CompileError::UnknownArch { arch, log });
        }
        code => return Err(run.failed("nvrtcCompileProgram", code, log)),
    }
    let cubin = run.bytes(("nvrtcGetCUBIN", table.cubin_size, table.cubin))?;
    let ptx = run.text(("nvrtcGetPTX", table.ptx_size, table.ptx))?;
    Ok(Compiled {
        cubin,
        ptx: String::from_utf8_lossy(&ptx).into_owned(),
        log,
    })
}

/// Texts for C, which live as long as this value.
struct CTexts(Vec<CString>);

impl CTexts {
    fn of<T: AsRef<str>>(texts: &[T], source: &Source) -> Result<Self, CompileError> {
        let texts = texts.iter().map(|text| c_text(text.as_ref(), source));
        Ok(Self(texts.collect::<Result<_, _>>()?))
    }

    fn pointers(&self) -> Vec<*const c_char> {
        self.0.iter().map(|text| text.as_ptr()).collect()
    }

    /// There are a few files and options.
    fn count(&self) -> c_int {
        c_int::try_from(self.0.len()).unwrap_or(c_int::MAX)
    }
}

fn c_text(text: &str, source: &Source) -> Result<CString, CompileError> {
    let name = || source.name.clone();
    CString::new(text).map_err(|_| CompileError::ZeroByte { name: name() })
}

/// One call that says a size, one that writes as many bytes, and the name of the second.
type Output = (
    &'static str,
    unsafe extern "C" fn(Program, *mut usize) -> c_int,
    unsafe extern "C" fn(Program, *mut c_char) -> c_int,
);

/// A program of NVRTC.
struct Run<'a> {
    table: NvrtcTable,
    source: &'a Source,
    program: Program,
    /// NVRTC may look at the texts as long as the program lives.
    _texts: [CTexts; 3],
}

impl<'a> Run<'a> {
    fn create(table: NvrtcTable, source: &'a Source) -> Result<Self, CompileError> {
        let own = CTexts::of(&[&source.text, &source.name], source)?;
        let names: Vec<&str> = source.headers.iter().map(|(name, _)| name.as_str()).collect();
        let contents: Vec<&str> = source.headers.iter().map(|(_, text)| text.as_str()).collect();
        let (names, contents) = (CTexts::of(&names, source)?, CTexts::of(&contents, source)?);
        let (name_pointers, content_pointers) = (names.pointers(), contents.pointers());
        let mut program: Program = std::ptr::null_mut();
        let own_pointers = own.pointers();
        let count = names.count();
        // SAFETY: every text has an end and lives as long as the program; the two lists have as many entries as `count` says.
        let code = unsafe {
            (table.create)(
                &raw mut program,
                own_pointers[0],
                own_pointers[1],
                count,
                content_pointers.as_ptr(),
                name_pointers.as_ptr(),
            )
        };
        let run = Self {
            table,
            source,
            program,
            _texts: [own, names, contents],
        };
        match code {
            SUCCESS => Ok(run),
            code => Err(run.failed("nvrtcCreateProgram", code, String::new())),
        }
    }

    fn failed(&self, call: &'static str, code: c_int, log: String) -> CompileError {
        // SAFETY: NVRTC answers any number with a text that it keeps, or with null.
        let text = unsafe { (self.table.error_string)(code) };
        let text = match text.is_null() {
            true => "unknown".to_owned(),
            // SAFETY: as above: a text with an end.
            false => unsafe { std::ffi::CStr::from_ptr(text) }.to_string_lossy().into_owned(),
        };
        CompileError::Failed {
            call,
            code,
            text,
            name: self.source.name.clone(),
            log,
        }
    }

    fn bytes(&self, (call, size, write): Output) -> Result<Vec<u8>, CompileError> {
        let mut bytes: usize = 0;
        // SAFETY: the program is alive, and NVRTC writes one size.
        let code = unsafe { size(self.program, &raw mut bytes) };
        if code != SUCCESS {
            return Err(self.failed(call, code, String::new()));
        }
        if bytes > OUTPUT_BYTES_MAX {
            let name = self.source.name.clone();
            return Err(CompileError::AbsurdOutput { name, bytes });
        }
        let mut output = vec![0_u8; bytes];
        // SAFETY: NVRTC writes as many bytes as it said.
        let code = unsafe { write(self.program, output.as_mut_ptr().cast()) };
        match code {
            SUCCESS => Ok(output),
            code => Err(self.failed(call, code, String::new())),
        }
    }

    /// Without the zero at its end.
    fn text(&self, output: Output) -> Result<Vec<u8>, CompileError> {
        let mut text = self.bytes(output)?;
        let end = text.iter().position(|byte| *byte == 0).unwrap_or(text.len());
        text.truncate(end);
        Ok(text)
    }
}

impl Drop for Run<'_> {
    fn drop(&mut self) {
        if !self.program.is_null() {
            // SAFETY: this value owns the program.
            let _ = unsafe { (self.table.destroy)(&raw mut self.program) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::loader::Search;

    #[test]
    fn without_a_compiler_the_error_says_so() {
        let libraries = Libraries::find(&Search::default());
        let source = Source {
            name: "empty.cu".to_owned(),
            text: String::new(),
            headers: Vec::new(),
            defines: Vec::new(),
            options: Vec::new(),
        };
        let arch: Arch = "sm_80".parse().expect("an architecture");
        let compiled = compile(&libraries, &source, arch);
        match libraries.nvrtc_version() {
            // This machine has one.
            Some(_) => assert!(compiled.is_ok(), "{compiled:?}"),
            None => assert!(matches!(compiled, Err(CompileError::NoCompiler(_))), "{compiled:?}"),
        }
    }

    #[test]
    fn a_zero_byte_in_a_text_is_refused_before_the_compiler_sees_it() {
        let source = Source {
            name: "a.cu".to_owned(),
            text: "a\0b".to_owned(),
            headers: Vec::new(),
            defines: Vec::new(),
            options: Vec::new(),
        };
        let texts = CTexts::of(&[&source.text], &source).map(|texts| texts.count());
        assert_eq!(
            texts,
            Err(CompileError::ZeroByte {
                name: "a.cu".to_owned()
            })
        );
    }
}
