//! An instruction as the machine runs it: decoded once, with register numbers and a function for its arithmetic.

use crate::number::convert::Conversion;
use crate::types::Type;

/// The bits of three operands to the bits of the result. Bits above an operand's type are zero, and so are the result's.
pub(crate) type Compute = fn(u64, u64, u64) -> u64;

#[derive(Clone, Debug)]
pub(crate) struct Instruction {
    /// A predicate register, and the value that lets the instruction run.
    pub(crate) guard: Option<(u32, bool)>,
    pub(crate) op: Op,
    /// Of the CUDA source, else of the PTX.
    pub(crate) line: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    Register(u32),
    Constant(u64),
    Special(Special),
}

/// A register that the hardware fills. The number is the dimension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Special {
    Thread(u8),
    Threads(u8),
    Block(u8),
    Blocks(u8),
    Lane,
    Warp,
    Warps,
    Multiprocessor,
    LanesEqual,
    LanesBelow,
    LanesUpTo,
    LanesAbove,
    LanesFrom,
    DynamicSharedBytes,
}

impl Special {
    pub(crate) fn named(name: &str) -> Option<Self> {
        if let Some((base, dimension)) = name.split_once('.') {
            let dimension = "xyz".find(dimension).filter(|_| dimension.len() == 1)? as u8;
            return match base {
                "%tid" => Some(Special::Thread(dimension)),
                "%ntid" => Some(Special::Threads(dimension)),
                "%ctaid" => Some(Special::Block(dimension)),
                "%nctaid" => Some(Special::Blocks(dimension)),
                _ => None,
            };
        }
        Some(match name {
            "%laneid" => Special::Lane,
            "%warpid" => Special::Warp,
            "%nwarpid" => Special::Warps,
            "%smid" => Special::Multiprocessor,
            "%lanemask_eq" => Special::LanesEqual,
            "%lanemask_lt" => Special::LanesBelow,
            "%lanemask_le" => Special::LanesUpTo,
            "%lanemask_gt" => Special::LanesAbove,
            "%lanemask_ge" => Special::LanesFrom,
            "%dynamic_smem_size" => Special::DynamicSharedBytes,
            _ => return None,
        })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Space {
    Global,
    Shared,
    Local,
    Param,
    /// `.const` variables of the module.
    Constant,
    Generic,
}

impl Space {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Space::Global => "global",
            Space::Shared => "shared",
            Space::Local => "local",
            Space::Param => "parameter",
            Space::Constant => "constant",
            Space::Generic => "generic",
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Address {
    pub(crate) base: Source,
    pub(crate) offset: i64,
}

#[derive(Clone, Debug)]
pub(crate) enum Op {
    Compute {
        f: Compute,
        to: u32,
        from: [Source; 3],
    },
    Compute4 {
        f: fn([u64; 4]) -> u64,
        to: u32,
        from: Box<[Source; 4]>,
    },
    Carry(Box<Carry>),
    Compare {
        f: fn(u64, u64) -> bool,
        to: u32,
        from: [Source; 2],
    },
    CompareAnd(Box<CompareAnd>),
    Convert {
        to: Target,
        from: Source,
        conversion: Conversion,
    },
    /// Parts of a register's bits, the lowest first.
    Pack {
        to: u32,
        from: Box<[Source]>,
        part_bits: u32,
    },
    Unpack {
        to: Box<[u32]>,
        from: Source,
        part_bits: u32,
    },
    /// `cvta.to`: a generic address to an offset.
    FromGeneric {
        to: u32,
        from: Source,
        window: u64,
    },
    Load(Box<Load>),
    Store(Box<Store>),
    Atomic(Box<Atomic>),
    CopyAsync(Box<CopyAsync>),
    CommitCopies,
    WaitForCopies {
        pending_max: u32,
    },
    /// Also for copies that no group has.
    WaitForAllCopies,
    Branch {
        to: usize,
    },
    BranchTable {
        index: Source,
        to: Box<[usize]>,
    },
    /// A fence: a thread sees its own order anyway, and what others see is judged by the shadow.
    Nothing,
    Exit,
    Trap,
    Barrier,
    Warp(Box<WarpOp>),
}

/// A register with its width: a narrower signed value is extended to it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Target {
    pub(crate) register: u32,
    pub(crate) ty: Type,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Carry {
    /// With the carry as third operand; gives the result and the new carry.
    pub(crate) f: fn(u64, u64, u64) -> (u64, u64),
    pub(crate) to: u32,
    pub(crate) from: [Source; 2],
    pub(crate) reads_carry: bool,
    pub(crate) writes_carry: bool,
}

/// The function of `.and`, `.or`, `.xor`.
pub(crate) type Combine = fn(bool, bool) -> bool;

/// `setp` with two results or a predicate to combine with, and `set`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CompareAnd {
    pub(crate) f: fn(u64, u64) -> bool,
    pub(crate) from: [Source; 2],
    /// With the predicate that it combines with.
    pub(crate) combine: Option<(Combine, Predicate)>,
    pub(crate) to: u32,
    /// Gets the opposite comparison, combined alike.
    pub(crate) to_opposite: Option<u32>,
    /// The bits that stand for true.
    pub(crate) truth: u64,
}

/// A predicate operand.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Predicate {
    pub(crate) from: Source,
    pub(crate) is_negated: bool,
}

#[derive(Clone, Debug)]
pub(crate) struct Load {
    pub(crate) space: Space,
    pub(crate) address: Address,
    pub(crate) ty: Type,
    pub(crate) to: Vec<Target>,
    /// `.nc`
    pub(crate) is_read_only: bool,
}

#[derive(Clone, Debug)]
pub(crate) struct Store {
    pub(crate) space: Space,
    pub(crate) address: Address,
    pub(crate) ty: Type,
    pub(crate) from: Vec<Source>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Atomic {
    pub(crate) space: Space,
    pub(crate) address: Address,
    pub(crate) bytes: usize,
    /// Of the old value and the operands.
    pub(crate) f: Compute,
    pub(crate) operands: [Source; 2],
    /// Gets the old value.
    pub(crate) to: Option<u32>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct CopyAsync {
    pub(crate) to: Address,
    pub(crate) from: Address,
    pub(crate) bytes: usize,
    /// The rest is filled with zeros.
    pub(crate) real_bytes: Source,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shuffle {
    Up,
    Down,
    Xor,
    Index,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Vote {
    All,
    Any,
    Uniform,
    Ballot,
}

/// What lanes do together: it runs when every lane of the mask is there.
#[derive(Clone, Debug)]
pub(crate) struct WarpOp {
    /// The lanes that take part, as each of them states it. `None`: all 32, and each has to be alive.
    pub(crate) mask: Option<Source>,
    pub(crate) action: WarpAction,
}

#[derive(Clone, Debug)]
pub(crate) enum WarpAction {
    Sync,
    Shuffle {
        mode: Shuffle,
        to: u32,
        in_range: Option<u32>,
        value: Source,
        lane: Source,
        clamp: Source,
    },
    Vote {
        mode: Vote,
        to: u32,
        predicate: Predicate,
    },
    Reduce {
        f: Compute,
        to: u32,
        value: Source,
    },
    /// `ldmatrix`: one register for each 8x8 matrix.
    LoadMatrices {
        to: Vec<u32>,
        address: Address,
        is_transposed: bool,
    },
    Multiply(Multiply),
}

/// `mma.sync` m16n8k8 or m16n8k16 of 16-bit values, with sums in f32.
#[derive(Clone, Debug)]
pub(crate) struct Multiply {
    pub(crate) ty: Type,
    pub(crate) to: [u32; 4],
    /// Two registers for each 8 of depth.
    pub(crate) a: Vec<Source>,
    /// One register for each 8 of depth.
    pub(crate) b: Vec<Source>,
    pub(crate) c: [Source; 4],
}
