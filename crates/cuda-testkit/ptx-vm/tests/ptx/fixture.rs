//! A module, its memory, and launches of its kernels.

use ptx_vm::{Fault, FindingKind, Findings, Launch, Memory, Module};

pub const HEADER: &str = ".version 9.0\n.target sm_90a\n.address_size 64\n";
/// Seeds that every test of a right kernel runs with. 0 is the natural order.
pub const SEEDS: [u64; 4] = [0, 1, 2, 77];
/// A loop that does not end is found quickly.
const STEPS_MAX: u64 = 1_000_000;
const ALIGN: usize = 256;

/// Bytes that a kernel uses at their own address, aligned as `cuMemAlloc` aligns.
pub struct Array {
    storage: Vec<u8>,
    start: usize,
    bytes: usize,
}

impl Array {
    pub fn new(bytes: usize) -> Self {
        let storage = vec![0; bytes + ALIGN];
        let start = storage.as_ptr().align_offset(ALIGN);
        Self { storage, start, bytes }
    }

    pub fn of(contents: &[u8]) -> Self {
        let mut array = Self::new(contents.len());
        array.storage[array.start..array.start + contents.len()].copy_from_slice(contents);
        array
    }

    pub fn of_u16(values: impl IntoIterator<Item = u16>) -> Self {
        Self::of(&values.into_iter().flat_map(u16::to_le_bytes).collect::<Vec<_>>())
    }

    pub fn of_u32(values: impl IntoIterator<Item = u32>) -> Self {
        Self::of(&values.into_iter().flat_map(u32::to_le_bytes).collect::<Vec<_>>())
    }

    pub fn of_u64(values: impl IntoIterator<Item = u64>) -> Self {
        Self::of(&values.into_iter().flat_map(u64::to_le_bytes).collect::<Vec<_>>())
    }

    pub fn address(&mut self) -> u64 {
        (self.storage.as_mut_ptr().expose_provenance() + self.start) as u64
    }

    pub fn bytes(&self) -> &[u8] {
        &self.storage[self.start..self.start + self.bytes]
    }

    pub fn u32s(&self) -> Vec<u32> {
        self.bytes()
            .as_chunks::<4>()
            .0
            .iter()
            .map(|bytes| u32::from_le_bytes(*bytes))
            .collect()
    }

    pub fn u64s(&self) -> Vec<u64> {
        self.bytes()
            .as_chunks::<8>()
            .0
            .iter()
            .map(|bytes| u64::from_le_bytes(*bytes))
            .collect()
    }

    pub fn f32s(&self) -> Vec<f32> {
        self.u32s().into_iter().map(f32::from_bits).collect()
    }
}

pub struct Fixture {
    module: Module,
    pub memory: Memory,
    pub findings: Findings,
    pub seed: u64,
    pub dynamic_shared_bytes: usize,
    pub steps_max: u64,
}

impl Fixture {
    /// The text has everything but the header.
    pub fn new(text: &str) -> Self {
        let module = Module::parse(&format!("{HEADER}{text}")).unwrap_or_else(|error| panic!("{error}"));
        Self {
            module,
            memory: Memory::default(),
            findings: Findings::default(),
            seed: 0,
            dynamic_shared_bytes: 0,
            steps_max: STEPS_MAX,
        }
    }

    /// One kernel `k` with so many 64-bit parameters, which are in %rd1 and up. The body has %p, %rs, %r, %f and %rd.
    pub fn of_body(params: usize, body: &str) -> Self {
        Self::new(&kernel(params, body))
    }

    /// An array that has its values.
    pub fn input(&mut self, array: &mut Array) -> u64 {
        let at = self.output(array);
        self.memory.set_initialised(at, array.bytes().len());
        at
    }

    /// An array that nobody has written.
    pub fn output(&mut self, array: &mut Array) -> u64 {
        let at = array.address();
        self.memory.add(at, array.bytes().len());
        at
    }

    pub fn launch(&mut self, grid: u32, block: u32, args: &[u64]) -> Result<u64, Fault> {
        let name = self.module.names().next().unwrap().to_owned();
        let kernel = self.module.kernel(&name).unwrap();
        let mut params = vec![0; kernel.param_bytes];
        for (param, value) in kernel.params.iter().zip(args) {
            let bytes = param.bytes.min(8);
            params[param.offset..param.offset + bytes].copy_from_slice(&value.to_le_bytes()[..bytes]);
        }
        let launch = Launch {
            kernel: &kernel,
            grid: [grid, 1, 1],
            block: [block, 1, 1],
            dynamic_shared_bytes: self.dynamic_shared_bytes,
            params: &params,
            seed: self.seed,
            steps_max: self.steps_max,
        };
        ptx_vm::run(&launch, &mut self.memory, &mut self.findings)
    }

    /// Kind and lines of each finding.
    pub fn found(&self) -> Vec<(FindingKind, u32, u32)> {
        self.findings
            .list()
            .into_iter()
            .map(|finding| (finding.kind, finding.line, finding.other_line))
            .collect()
    }

    #[track_caller]
    pub fn assert_clean(&self) {
        assert!(self.findings.is_empty(), "{:#?}", self.findings.list());
    }
}

pub fn kernel(params: usize, body: &str) -> String {
    let declared: Vec<String> = (0..params)
        .map(|index| format!(".param .u64 k_param_{index}"))
        .collect();
    let loads: String = (0..params)
        .map(|index| format!("ld.param.u64 %rd{}, [k_param_{index}];\n", index + 1))
        .collect();
    format!(
        ".visible .entry k({})\n{{\n.reg .pred %p<10>;\n.reg .b16 %rs<20>;\n.reg .b32 %r<40>;\n.reg .f32 %f<40>;\n\
         .reg .b64 %rd<40>;\n{loads}{body}\nret;\n}}\n",
        declared.join(", ")
    )
}

/// Runs instructions in one thread. Each input is in %rdN, %rN, %rsN and (as not zero) %pN, from N = 1. The result is the
/// register 0 that the text names.
pub fn evaluate(instructions: &str, inputs: &[u64]) -> u64 {
    let mut body = String::from("mov.u64 %rd10, %rd1;\nmov.u64 %rd11, %rd2;\n");
    for index in 0..inputs.len() {
        let (n, at) = (index + 1, 8 * index);
        body += &format!(
            "ld.global.u64 %rd{n}, [%rd10+{at}];\ncvt.u32.u64 %r{n}, %rd{n};\ncvt.u16.u64 %rs{n}, %rd{n};\n\
             setp.ne.u64 %p{n}, %rd{n}, 0;\n"
        );
    }
    body += instructions;
    body += if instructions.contains("%rd0") {
        "\nst.global.u64 [%rd11], %rd0;"
    } else if instructions.contains("%rs0") {
        "\nst.global.u16 [%rd11], %rs0;"
    } else if instructions.contains("%p0") {
        "\nselp.u64 %rd0, 1, 0, %p0;\nst.global.u64 [%rd11], %rd0;"
    } else {
        "\nst.global.u32 [%rd11], %r0;"
    };
    let mut fixture = Fixture::of_body(2, &body);
    let (mut input, mut output) = (Array::of_u64(inputs.iter().copied()), Array::of_u64([0]));
    let args = [fixture.input(&mut input), fixture.output(&mut output)];
    fixture
        .launch(1, 1, &args)
        .unwrap_or_else(|fault| panic!("{instructions}: {fault}"));
    fixture.assert_clean();
    output.u64s()[0]
}

/// Instructions, inputs, and the bits of the result.
pub type Case<'a> = (&'a str, &'a [u64], u64);

#[track_caller]
pub fn assert_values(cases: &[Case<'_>]) {
    for (instructions, inputs, expected) in cases {
        let value = evaluate(instructions, inputs);
        assert_eq!(
            value, *expected,
            "{instructions} of {inputs:x?}: {value:#x} instead of {expected:#x}"
        );
    }
}

/// The bits of a 32-bit signed number.
pub const fn s32(value: i32) -> u64 {
    value as u32 as u64
}

pub const fn f32_bits(value: f32) -> u64 {
    value.to_bits() as u64
}
