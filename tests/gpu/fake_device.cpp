// A CUDA device that does nothing. PyTorch's autograd engine asks for a device's guard and hooks even when all tensors
// are fake; a build for CPU has neither. Loaded before the first use of torch (see fake_cuda.py).
#include <utility>

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

c10::Device device() { return {c10::DeviceType::CUDA, 0}; }

struct Guard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::Device exchangeDevice(c10::Device) const override { return device(); }
  c10::Device getDevice() const override { return device(); }
  // Which stream is current is kept; streams are numbers.
  static c10::StreamId& current() {
    thread_local c10::StreamId id = 0;
    return id;
  }
  static c10::Stream stream(c10::StreamId id) { return c10::Stream(c10::Stream::UNSAFE, device(), id); }
  c10::Stream getStream(c10::Device) const noexcept override { return stream(current()); }
  c10::Stream getNewStream(c10::Device, int) const override {
    static c10::StreamId made = 0;
    return stream(++made);
  }
  c10::Stream exchangeStream(c10::Stream next) const noexcept override {
    return stream(std::exchange(current(), next.id()));
  }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
};

// "CUDAHooks" is the name that at::detail::getCUDAHooks asks for.
c10::Registerer<std::string, std::unique_ptr<at::CUDAHooksInterface>, at::CUDAHooksArgs> registered(
    "CUDAHooks", at::CUDAHooksRegistry(), [](at::CUDAHooksArgs args) -> std::unique_ptr<at::CUDAHooksInterface> {
      return std::make_unique<Hooks>(args);
    });

}  // namespace
